"""The simulated driver rejects what the real driver rejects, so tests with it find wrong calls.

Statuses of the driver: 0 success, 1 invalid value, 3 not initialized, 201 invalid context, 900 not
supported during a capture, 901 capture invalidated. Statuses of cuBLAS: 7 invalid value, 13
execution failed.

`cuda.run` runs a program with the simulated libraries, asserts that it succeeds, and returns the
log of its calls; `of` selects the calls of one kind. The programs need not import `os` and
`trainable_candle as tc`: `cuda.run` does it for them.
"""

from typing import Any

START = """
    import ctypes

    driver = ctypes.CDLL("libcuda.so.1")
    # `cuda.run` puts the folder of the simulated libraries first. Below it, all libraries except
    # the driver are where pip would put them.
    folder = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    blas = ctypes.CDLL(f"{folder}/nvidia/cu13/lib/libcublas.so.13")
    pointer, size, no_flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ulonglong(0)

    def call(name, *arguments, library=driver):
        return getattr(library, name)(*arguments)

    def create(name, *arguments, library=driver):
        value = pointer()
        assert call(name, ctypes.byref(value), *arguments, library=library) == 0, name
        return value

    assert call("cuMemAlloc_v2", ctypes.byref(pointer()), size(16)) == 3
    assert call("cuInit", 0) == 0
    assert call("cuMemAlloc_v2", ctypes.byref(pointer()), size(16)) == 201
    context = create("cuDevicePrimaryCtxRetain", 0)
    call("cuCtxSetCurrent", context)
    stream = create("cuStreamCreate", 1)  # 1: independent of the default stream
    memory = create("cuMemAlloc_v2", size(1 << 20))
    address = memory.value
    pageable = ctypes.create_string_buffer(64)
    pinned = create("cuMemHostAlloc", size(64), 0)
    GLOBAL, LOCAL, RELAXED = 0, 1, 2  # modes of a capture

    def fill(start, count):
        return call("cuMemsetD8Async", pointer(start), ctypes.c_ubyte(7), size(count), stream)

    # Capture a fill and then `work`, which must return the status `expected`.
    def capture(mode, work, expected):
        assert call("cuStreamBeginCapture_v2", stream, mode) == 0
        assert fill(address, 64) == 0
        found = work()
        assert found == expected, (found, expected)
        graph = pointer()
        ended = call("cuStreamEndCapture", stream, ctypes.byref(graph))
        assert ended == (901 if expected else 0), ended
        assert (graph.value is None) == bool(expected)
        return graph
"""


def test_accesses_outside_of_allocations_are_rejected(cuda: Any) -> None:
    cuda.run(START + """
    assert fill(address, 1 << 20) == 0
    assert fill(address, (1 << 20) + 1) == 1  # beyond the end
    assert fill(address - 1, 1) == 1  # before the start
    assert call("cuMemFree_v2", pointer(address + 1)) == 1
    assert call("cuMemFree_v2", pointer(address)) == 0
    assert fill(address, 1) == 1  # after it was freed
    assert call("cuMemFree_v2", pointer(address)) == 1
    """)  # fmt: skip


def test_capture_rejects_what_the_driver_rejects(cuda: Any) -> None:
    run = cuda.run(START + """
    def copy(host):
        return lambda: call("cuMemcpyDtoHAsync_v2", host, memory, size(64), stream)

    def allocate():
        return call("cuMemAlloc_v2", ctypes.byref(pointer()), size(16))

    capture(GLOBAL, lambda: fill(address, 1), 0)
    capture(GLOBAL, lambda: call("cuStreamSynchronize", stream), 900)
    capture(RELAXED, lambda: call("cuStreamSynchronize", stream), 900)
    capture(RELAXED, lambda: call("cuCtxSynchronize"), 900)
    capture(RELAXED, copy(pageable), 900)
    capture(RELAXED, copy(pinned), 0)
    capture(GLOBAL, allocate, 900)
    capture(LOCAL, allocate, 900)
    capture(RELAXED, allocate, 0)
    # A captured fill writes at each launch of the graph, not during the capture.
    graph = capture(GLOBAL, lambda: fill(address, 64), 0)
    executable = create("cuGraphInstantiateWithFlags", graph, no_flags)
    call("cuMemsetD8Async", memory, ctypes.c_ubyte(0), size(64), stream)
    copy(pageable)()
    assert pageable.raw == bytes(64)
    assert call("cuGraphLaunch", executable, stream) == 0
    copy(pageable)()
    assert pageable.raw == bytes([7] * 64)
    """)  # fmt: skip
    # The graph has two fills: one by `capture` and one by its `work`.
    assert [call["fills"] for call in run.of("replay")] == ["2"]
    assert run.waits != []  # the copies to pageable memory


def test_accesses_outside_of_mapped_memory_are_rejected(cuda: Any) -> None:
    cuda.run(START + """
    class Location(ctypes.Structure):
        _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]

    class Properties(ctypes.Structure):
        _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", Location),
                    ("rest", ctypes.c_byte * 64)]

    class Access(ctypes.Structure):
        _fields_ = [("location", Location), ("flags", ctypes.c_int)]

    chunk = 2 << 20
    device_0 = Location(1, 0)  # the type 1 is a device
    start = create("cuMemAddressReserve", size(4 * chunk), size(0), pointer(), no_flags).value
    handle = create("cuMemCreate", size(chunk), ctypes.byref(Properties(1, 0, device_0)),
                    no_flags)
    assert fill(start, 1) == 1  # nothing is mapped
    assert call("cuMemMap", pointer(start), size(chunk), size(0), handle, no_flags) == 0
    assert fill(start, 1) == 1  # mapped, but not accessible yet
    access = Access(device_0, 3)  # reading and writing
    assert call("cuMemSetAccess", pointer(start), size(chunk), ctypes.byref(access), size(1)) == 0
    assert fill(start, chunk) == 0
    assert fill(start, chunk + 1) == 1
    assert call("cuMemAddressFree", pointer(start), size(4 * chunk)) == 1  # still mapped
    assert call("cuMemUnmap", pointer(start), size(chunk)) == 0
    assert fill(start, 1) == 1
    assert call("cuMemRelease", handle) == 0
    assert call("cuMemAddressFree", pointer(start), size(4 * chunk)) == 0
    """)  # fmt: skip


def test_products_with_wrong_sizes_are_rejected(cuda: Any) -> None:
    run = cuda.run(START + """
    handle = create("cublasCreate_v2", library=blas)
    call("cublasSetStream_v2", handle, stream, library=blas)
    one, F32 = ctypes.c_float(1), 0

    # A product of matrices (m, k) and (k, n). Both and the result are at the same address, in
    # memory of 1 MiB: exactly 512 columns of 512 f32 numbers.
    def product(m, n, k):
        # Address, type, distance between columns, distance between matrices of a batch.
        matrix = (memory, F32, 512, ctypes.c_longlong(0))
        scale = ctypes.byref(one)  # alpha and beta
        batch, compute_f32, algorithm = 1, 68, -1
        # The two zeros: neither matrix is transposed.
        arguments = (handle, 0, 0, m, n, k, scale, *matrix, *matrix, scale, *matrix,
                     batch, compute_f32, algorithm)
        return call("cublasGemmStridedBatchedEx", *arguments, library=blas)

    assert product(512, 512, 512) == 0
    assert product(513, 512, 512) == 7  # columns overlap
    assert product(512, 513, 512) == 13  # beyond the end
    """)  # fmt: skip
    # Only the first call is logged as a product: the others were rejected.
    (product,) = run.of("product")
    assert [product[name] for name in ("m", "n", "k", "beta")] == ["512", "512", "512", "1"]


def test_logged_launches_have_names_and_arguments(cuda: Any) -> None:
    """The table of kernels comes from the machine code in the extension."""
    kernels = cuda.kernels.read_text().splitlines()
    fields = next(line.split() for line in kernels if " sm_90a fill_f32 " in line)
    # Fields: checksum, architecture, name, registers, threads, shared memory, sizes of parameters.
    assert fields[6].split(",")[0] == "8"  # the bytes of its first parameter, an address
    assert int(fields[3]) > 0  # registers
    run = cuda.run("""
        for count in (1, 1000):
            tc.full((count,), 2.0, device="cuda")
    """)
    for call in run.of("launch"):
        assert call["name"] == "fill_f32"
        address, _, value = call["arguments"].split(",")
        # Addresses are logged as "device"; the value is 2.0 in f64.
        assert (address, value) == ("device", "0x4000000000000000")
