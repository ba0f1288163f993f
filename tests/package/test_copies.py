"""The errors of objects that cannot be copied or pickled say what to do instead."""

import copy
import pickle

import pytest

import trainable_candle as tc


def test_objects_of_the_extension_cannot_be_copied_or_pickled() -> None:
    model = tc.models.DigitsTransformer()
    adapter = model.add_adapter(tc.LoraConfig(r=1, target_modules="all-linear"))
    # Each object with the advice in its error, a regular expression.
    cases = [
        (tc.optim.AdamW(adapter.parameters()), r"load its state_dict\(\) into a new one"),
        (tc.optim.EMA(adapter), r"load its state_dict\(\) into a new one"),
        (tc.optim.GradScaler(), r"load its state_dict\(\) into a new one"),
        (adapter, r"save\(\) it, and load\(\) the file into the adapter of another model"),
        (model, "load the model again from its files"),
        (tc.quantize(tc.ones(64, 64), "nf4"), "quantize the tensor again"),
    ]
    for value, advice in cases:
        expected = f"{type(value).__name__} cannot be copied or pickled: {advice}"
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=expected):
                duplicate(value)
        # The advice to load a state dict works: the method that it names accepts one.
        if "state_dict" in advice:
            value.load_state_dict(value.state_dict())
