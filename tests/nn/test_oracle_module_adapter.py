"""peft and this library read each other's adapters on a user's own module, and compute the same."""

from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

# Five samples of 2 channels of 4 x 4. The convolution makes 4 channels of 2 x 2: 16 features.
X = np.random.default_rng(0).standard_normal((5, 2, 4, 4)).astype(np.float32)


class Ours(tc.nn.Module):
    def __init__(self) -> None:
        self.conv = tc.nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.fc = tc.nn.Linear.init(16, 8)

    def forward(self, x: tc.Tensor) -> tc.Tensor:
        return self.fc(self.conv(x).reshape((x.shape[0], -1)))


class Theirs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.fc = torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1))


@pytest.mark.parametrize(
    "config",
    [
        {"r": 2, "lora_alpha": 3.0, "target_modules": ["conv", "fc"]},
        {"r": 4, "lora_alpha": 2.0, "target_modules": ["fc"], "use_rslora": True},
        {"r": 2, "lora_alpha": 4.0, "target_modules": ["fc"], "adapter": "dora"},
    ],
    ids=["lora", "rslora", "dora"],
)
def test_each_library_reads_the_folder_that_the_other_saved(config: dict, tmp_path: Path) -> None:
    ours, theirs = Ours(), Theirs()
    state = {name: torch.from_numpy(t.numpy()) for name, t in ours.state_dict().items()}
    theirs.load_state_dict(state)
    model = tc.get_peft_model(ours, tc.LoraConfig(**config))
    # Give the adapters an effect: at first they do not change the output.
    for var in model.adapter.parameters():
        var.set(var.detach() + tc.randn(*var.shape) * 0.3)
    expected = model(tc.tensor(X)).detach().numpy()
    model.save_pretrained(tmp_path / "ours")
    in_peft = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "ours"))
    found = in_peft(torch.from_numpy(X)).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=2e-6)
    in_peft.save_pretrained(str(tmp_path / "theirs"))
    # `unload` returns the module without the adapters.
    again = tc.PeftModel.from_pretrained(model.unload(), tmp_path / "theirs")
    np.testing.assert_allclose(again(tc.tensor(X)).detach().numpy(), expected, atol=2e-6)
