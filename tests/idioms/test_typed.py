"""Idioms of torch's users with type annotations: `make lint` checks this file with mypy, too."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

import trainable_candle as tc
from trainable_candle import nn
from trainable_candle.loader import DataLoader, TensorDataset

F = nn.functional


class Net(nn.Module):
    def __init__(self) -> None:
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.last = nn.Sequential(nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 4))
        self.shift = nn.Parameter(tc.zeros(4))

    def forward(self, x: tc.Tensor) -> tc.Tensor:
        h: tc.Tensor = self.first(x)
        for block in self.blocks:
            h = block(h).relu()
        y: tc.Tensor = self.last(h)
        return y + self.shift


def test_reductions_take_dim_and_axis() -> None:
    x = tc.ones(3, 4)
    found: list[tc.Tensor] = [
        x.sum(axis=1), x.mean(dim=1, keepdim=True), x.mean(dim=(0, 1)), x.max(1), x.min(axis=1),
        x.argmax(1), x.softmax(-1), x.std(axis=0), x.var(1, keepdim=True), x.prod(1), x.norm(dim=1),
        tc.sum(x), tc.mean(x, dim=1), tc.max(x), x.any(), x.all(), x.cumsum(1),
    ]  # fmt: skip
    assert found[0].tolist() == [4.0] * 3
    assert (found[1].shape, found[2].shape) == ((3, 1), ())


def test_operators_give_tensors() -> None:
    x = tc.randn(3, 4)
    found: list[tc.Tensor] = [
        x + 1, 1 - x, x * 2.0, 2 / (x * x + 1), x**2, -x, x @ x.T, x > 0, (x > 0) & (x < 1),
        ~(x > 0), x[0], x[:, 1:], x[..., None], x[tc.tensor([0, 1])], x[[0, 1]],
    ]  # fmt: skip
    assert [y.ndim for y in found[-5:]] == [1, 2, 3, 2, 2]
    assert all(isinstance(row, tc.Tensor) for row in x)


def test_properties_of_a_tensor_have_types() -> None:
    x = tc.ones(2, 2)
    shape: tuple[int, ...] = x.shape
    device: str = x.device
    dtype: tc.DType = x.dtype
    array: npt.NDArray[np.float32] = x.numpy()
    total: float = float(x.sum())
    assert (shape, device, dtype, total, len(x)) == ((2, 2), "cpu", tc.float32, 4.0, 2)
    np.testing.assert_array_equal(array, x.tolist())


def test_methods_that_change_shape_or_dtype_have_types() -> None:
    x = tc.randn(3, 4)
    found = [
        x.view(4, 3), x.reshape(-1), x.permute(1, 0), x.transpose(0, 1), x.flatten(), x.T,
        x.expand(2, 3, 4), x.unsqueeze(-1), x.squeeze(), x.chunk(2, 1)[0], x.split(2, dim=1)[1],
        tc.cat([x, x], dim=1), tc.stack((x, x)), x.flip(0), x.roll(1, 0), x.repeat(2, 1),
    ]  # fmt: skip
    assert [y.shape for y in found[:3]] == [(4, 3), (12,), (4, 3)]
    values, indices = x.topk(2)
    assert values.shape == (3, 2)
    assert indices.dtype == tc.int64
    assert [x.to("f16").dtype, x.to(tc.bfloat16).dtype, x.half().dtype] == ["f16", "bf16", "f16"]


def test_a_training_step_has_types(tmp_path: Path) -> None:
    net = Net().to("cpu").train()
    optimizer = tc.optim.AdamW([{"params": net.parameters(), "lr": 1e-3}], betas=(0.9, 0.95))
    scheduler = tc.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    x = tc.randn(4, 4)
    for inputs, targets in DataLoader(TensorDataset(x, x), batch_size=2, shuffle=True):
        loss = F.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        tc.optim.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    norms = [p.grad.norm().item() for p in net.parameters() if p.grad is not None]
    assert len(norms) == len(net.parameters())
    tc.save_file(net.state_dict(), tmp_path / "net.safetensors")
    result = net.load_state_dict(tc.load_file(tmp_path / "net.safetensors"), strict=False)
    assert result.missing == result.unexpected == []


@tc.no_grad()
def evaluate(net: Net, x: tc.Tensor) -> float:
    loss: float = F.mse_loss(net.eval()(x), x).item()
    return loss


def test_adapters_and_averages_have_types() -> None:
    net = Net()
    ema = tc.optim.VariableEMA(net.parameters(), decay=0.9)
    ema.update()
    with ema:
        assert evaluate(net, tc.ones(2, 4)) >= 0
    model: tc.PeftModel = tc.get_peft_model(net, tc.LoraConfig(r=2, target_modules=["first"]))
    assert len(model.parameters()) == 2  # the two factors of LoRA on the layer `first`
