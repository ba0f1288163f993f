"""Export and import of tensors by DLPack, and whether they share or copy memory."""

import gc
import weakref

import numpy as np
import pytest

import trainable_candle as tc


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "u8", "u32", "i64"])
def test_export_shares_memory(dtype):
    t = tc.tensor(np.arange(6).reshape(2, 3), dtype=dtype)
    first, second = np.from_dlpack(t), np.from_dlpack(t)
    np.testing.assert_array_equal(first, t.numpy())
    assert np.shares_memory(first, second)
    assert not first.flags.writeable


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.T,
        lambda t: t[1:, 1],
        lambda t: t[:0],
        lambda t: t.narrow(0, 2, 0),
        lambda t: t.narrow(0, 2, 0).narrow(1, 3, 0),
        lambda t: t.narrow(1, 3, 0).T.narrow(0, 0, 0),
        lambda t: t[0, 0],
        lambda t: t[:1].expand(4, 3),
    ],
    ids=[
        "transposed",
        "column",
        "empty slice",
        "empty narrow",
        "empty in both dimensions",
        "empty transposed",
        "one element",
        "expanded",
    ],
)
def test_exported_views_keep_their_values(view):
    t = view(tc.tensor(np.arange(6.0).reshape(2, 3)))
    np.testing.assert_array_equal(np.from_dlpack(t), t.numpy())


def test_exported_memory_outlives_the_tensor():
    t = tc.tensor(np.arange(1000.0))
    array = np.from_dlpack(t)
    del t
    gc.collect()
    # If the memory had been freed, one of these tensors could overwrite it.
    _ = [tc.zeros(1000, dtype="f64") for _ in range(10)]
    np.testing.assert_array_equal(array, np.arange(1000.0))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i64"])
def test_torch_shares_memory(dtype):
    torch = pytest.importorskip("torch")
    t = tc.tensor(np.arange(6).reshape(2, 3), dtype=dtype).T
    found = torch.from_dlpack(t)
    assert found.to(torch.float64).tolist() == t.tolist()
    found[0, 0] = 5
    assert t[0, 0].item() == 5
    assert tc.tensor(found).tolist() == t.tolist()
    # A variable cannot be exported.
    with pytest.raises(tc.AutogradError, match=r"detach\(\) it first"):
        torch.from_dlpack(tc.Var([1.0]))


def test_old_consumers_get_a_copy_by_default():
    class OldConsumer:
        """Gives numpy a tensor.

        Passes `options`, not numpy's arguments, to the tensor's `__dlpack__`. Without `options`,
        the tensor sees a consumer of DLPack before 1.0, which passes no `max_version`, and which
        cannot know that memory is read-only.
        """

        def __init__(self, tensor, **options):
            self.tensor, self.options = tensor, options

        def __dlpack__(self, **_):
            return self.tensor.__dlpack__(**self.options)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    t = tc.tensor([1.0, 2.0])
    shared = np.from_dlpack(t)
    assert not np.shares_memory(np.from_dlpack(OldConsumer(t)), shared)
    assert np.shares_memory(np.from_dlpack(OldConsumer(t, copy=False)), shared)
    assert not np.shares_memory(
        np.from_dlpack(OldConsumer(t, copy=True, max_version=(1, 0))), shared
    )


def test_capsules_that_are_never_consumed_leave_the_tensor_usable():
    t = tc.tensor([1.0, 2.0])
    for _ in range(100):
        t.__dlpack__()
        t.__dlpack__(max_version=(1, 0))
    assert t.tolist() == [1, 2]


def test_a_variable_is_exported_only_after_detach():
    with pytest.raises(tc.AutogradError, match=r"dlpack: .*detach\(\) it first"):
        tc.Var([1.0]).__dlpack__()
    np.testing.assert_array_equal(np.from_dlpack(tc.Var([1.0]).detach()), [1])


def test_unsupported_arguments_of_an_export_are_errors():
    with pytest.raises(BufferError, match="no streams"):
        tc.ones(1).__dlpack__(stream=1)
    # DLPack's device (1, 0) is the CPU, (2, 0) the first CUDA GPU.
    with pytest.raises(BufferError, match="on the CPU"):
        tc.ones(1).__dlpack__(dl_device=(2, 0))
    assert tc.ones(1).__dlpack_device__() == (1, 0)


@pytest.mark.parametrize(
    "values",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.arange(6, dtype=np.float16)[::-2],
        np.array([True, False]),
        np.array(3.0),
        np.zeros((0, 2), dtype=np.float32),
    ],
    ids=[
        "f64",
        "transposed i32",
        "reversed f16",
        "bool",
        "without dimensions",
        "empty",
    ],
)
def test_import_copies(values):
    t = tc.from_dlpack(values)
    expected = values.copy()
    np.testing.assert_array_equal(t.numpy(), expected)
    values[...] = 0
    np.testing.assert_array_equal(t.numpy(), expected)


def test_import_frees_the_producer():
    class Array(np.ndarray):
        """An array to which the test can hold a weak reference."""

    values = np.arange(4.0).view(Array)
    watch = weakref.ref(values)
    t = tc.from_dlpack(values)
    del values
    gc.collect()
    assert watch() is None
    assert t.tolist() == [0, 1, 2, 3]


def test_the_librarys_own_tensors_can_be_imported():
    t = tc.tensor([[1.0, 2.0]], dtype="bf16")
    assert tc.from_dlpack(t).dtype == "bf16"
    assert tc.from_dlpack(t).tolist() == [[1, 2]]


def test_a_capsule_is_used_once():
    capsule = tc.ones(2).__dlpack__()
    assert tc.from_dlpack(capsule).tolist() == [1, 1]
    with pytest.raises(tc.ArgumentError, match="not a DLPack tensor, or was used before"):
        tc.from_dlpack(capsule)


def test_import_rejects_what_it_cannot_copy():
    with pytest.raises(tc.ArgumentError, match="from_dlpack: list has no __dlpack__"):
        tc.from_dlpack([1])
    # Code 5 is complex, code 1 unsigned integers.
    with pytest.raises(tc.DTypeError, match="dlpack: elements of DLPack type code 5, 128 bits"):
        tc.from_dlpack(np.array([1j]))
    with pytest.raises(tc.DTypeError, match="dlpack: elements of DLPack type code 1, 64 bits"):
        tc.from_dlpack(np.array([1], dtype=np.uint64))


def test_producers_without_the_version_argument_are_read():
    class OldProducer:
        """A producer of DLPack before 1.0, whose `__dlpack__` takes no `max_version`."""

        def __dlpack__(self):
            return tc.tensor([4.0]).__dlpack__()

    assert tc.tensor(OldProducer()).tolist() == [4]


def test_exceptions_of_a_producer_reach_the_caller():
    class Broken:
        def __dlpack__(self, **_):
            raise RuntimeError("broken producer")

    with pytest.raises(RuntimeError, match="broken producer"):
        tc.from_dlpack(Broken())
