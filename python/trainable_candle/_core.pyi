"""
The compiled part of trainable-candle; import `trainable_candle` instead.
"""

import builtins
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final, SupportsFloat, SupportsIndex, final

from _typeshed import SupportsGetItem, SupportsLenAndGetItem
from numpy.typing import NDArray
from typing_extensions import Self, disjoint_base

from trainable_candle._device import device as Device
from trainable_candle._in_place import VarMethods
from trainable_candle._methods import ComposedMethods

__all__ = [
    "__version__",
    "build_profile",
    "Adapter",
    "AdapterFile",
    "AdapterModule",
    "AdapterReport",
    "AdapterSet",
    "AutoencoderKL",
    "AutoencoderKLQwenImage",
    "CLIPTextModel",
    "CapturedFunction",
    "CausalLM",
    "CheckpointFacts",
    "ChromaTransformer",
    "DType",
    "DiffusionObjective",
    "DigitsTransformer",
    "EMA",
    "FlowMatching",
    "Flux2Transformer",
    "FluxTransformer",
    "Generation",
    "GradScaler",
    "KVCache",
    "LoraConfig",
    "Model",
    "NcclCommunicator",
    "NoiseSchedule",
    "NoisedLatents",
    "Optimizer",
    "PartFacts",
    "QuantizedTensor",
    "QwenImageTransformer",
    "SD3Transformer",
    "SDXLUNet",
    "Sampler",
    "Schedule",
    "T5Encoder",
    "Tensor",
    "TextFeatures",
    "TrainingAdapter",
    "Var",
    "ZImageTransformer",
    "adapted_parts",
    "add_layer_norm",
    "arange",
    "available_bytes",
    "cat",
    "checkpoint",
    "choices",
    "classifier_free_guidance",
    "clip_grad_norm_",
    "conv2d",
    "cross_entropy",
    "cuda_bus_id",
    "cuda_device_count",
    "cuda_device_name",
    "cuda_empty_cache",
    "cuda_finish_profile",
    "cuda_link",
    "cuda_memory_stats",
    "cuda_reset_peak_memory_stats",
    "cuda_set_memory_limit",
    "cuda_stages_weights",
    "cuda_start_profile",
    "cuda_synchronize",
    "cuda_unavailable_reason",
    "draw_from",
    "dropout",
    "embedding",
    "empty_like",
    "eye",
    "fake_quantize",
    "from_dlpack",
    "full",
    "geglu",
    "get_float32_matmul_precision",
    "get_num_threads",
    "get_rng_state",
    "get_w8a8",
    "gguf_facts",
    "grad",
    "gradcheck",
    "gradient_vectors",
    "group_norm",
    "group_norm_silu",
    "huber_loss",
    "init_linear",
    "inspect",
    "is_grad_enabled",
    "l1_loss",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_log_probs",
    "load_file",
    "lora_backward",
    "lora_backward_",
    "manual_seed",
    "memory_machine",
    "modulated_layer_norm",
    "mse_loss",
    "nccl_unique_id",
    "nccl_version",
    "normal_samples",
    "ones",
    "ones_like",
    "optimizer_kinds",
    "pipeline_parts",
    "prepare_adapters",
    "quantize",
    "quick_gelu",
    "rand",
    "randint",
    "randn",
    "rms_norm",
    "rms_norm_rope",
    "rope",
    "save_adapters",
    "save_checkpoint",
    "save_file",
    "saved_bytes",
    "scaled_dot_product_attention",
    "set_float32_matmul_precision",
    "set_grad_enabled",
    "set_gradient_vectors",
    "set_num_threads",
    "set_resolver",
    "set_rng_state",
    "set_w8a8",
    "share_streamed",
    "smooth_l1_loss",
    "snapshot",
    "stack",
    "stream_seed",
    "swiglu",
    "tensor",
    "upsample_nearest2d",
    "varlen_attention",
    "verify_adapter",
    "where",
    "zeros",
    "zeros_like",
]

__version__: Final[str]
"""
Version of the package.
"""

build_profile: Final[str]
"""
Cargo profile of this build, `"release"` or `"debug"`.
"""

@final
class Adapter:
    """
    A trainable adapter of one frozen linear layer.

    Args:
        kind: "lora", "dora", "loha", "lokr" or "oft".
        weight: the layer's frozen weight, (out_features, in_features).
        bias: the layer's frozen bias, (out_features,).
        rank: rank of the low-rank product, at least 1.
        alpha: the low-rank product is multiplied by alpha / rank.
        dropout: probability of dropping an element of the adapter's input while training, in [0, 1).
        rslora: whether the factor is alpha / sqrt(rank) instead.
        qat: the format to which every forward pass rounds the adapted weight, as `nn.functional.fake_quantize` does.

    Raises:
        ArgumentError: if the kind is unknown, or a number is out of range.
        ShapeError: if the weight is not a matrix or the bias does not fit it.
        ConfigError: if the weight cannot be rounded as `qat` says.
    """
    def __new__(
        cls,
        /,
        kind: str,
        weight: Tensor,
        bias: Tensor | None,
        rank: SupportsIndex,
        alpha: SupportsFloat | SupportsIndex,
        dropout: SupportsFloat | SupportsIndex = ...,
        rslora: bool = False,
        qat: str | None = None,
    ) -> Adapter: ...
    def forward(self, /, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """
        The layer's result with the adapter: (..., in_features) -> (..., out_features).

        Raises:
            ShapeError, DTypeError, DeviceError: if the operands do not fit.
        """
    def merged_weight(self, /, weight: Tensor) -> Tensor:
        """
        The merged weight. A plain linear layer with this weight computes the same results as the layer with the
        adapter.
        """
    @property
    def scale(self, /) -> float:
        """
        The factor of the low-rank product.
        """
    def set_training(self, /, training: bool) -> None:
        """
        Set whether the adapter is in training mode, in which dropout is active.
        """
    def vars(self, /) -> list[Var]:
        """
        The trainable parameters of the kind of adapter: for LoRA down and up, for DoRA also the magnitude.
        """

@final
class AdapterFile:
    """
    An adapter file that is complete but not written yet, made by `prepare_adapters`.

    ```python
    unet = tc.models.load("sdxl")
    adapter = unet.add_adapter(tc.LoraConfig(r=4, target_modules=["to_q", "to_v"]))
    file = tc.prepare_adapters("lora.safetensors", [adapter])
    assert file.idle  # untrained layers
    file.write()
    ```
    """
    def __repr__(self, /) -> str: ...
    @property
    def idle(self, /) -> list[str]:
        """
        The names of layers whose adapter has no effect, because a factor is zero everywhere.
        """
    def write(self, /) -> None:
        """
        Write the file. If writing fails, no incomplete file remains.

        Raises:
            FileError: if the file cannot be written.
        """

@final
class AdapterModule:
    """
    One layer's adapter in a file. A module with the adapters of several layers is listed once for each layer.

    ```python
    report = tc.verify_adapter("adapter.safetensors", "sdxl", "sdxl")
    module = report.modules[0]
    assert (module.kind, module.rank, module.fault) == ("lora", 4, None)
    ```
    """
    @property
    def alpha(self, /) -> float | None:
        """
        The numerator of the scale; None if the file does not have it beside the parameters.
        """
    @property
    def changed_by(self, /) -> dict[str, str]:
        """
        Tools that apply it, but not as it was trained, with the reason.
        """
    @property
    def fault(self, /) -> str | None:
        """
        A message about wrong shapes or values, if there are any.
        """
    @property
    def ignored_by(self, /) -> dict[str, str]:
        """
        Tools that ignore it, with the reason.
        """
    @property
    def kind(self, /) -> str | None:
        """
        The kind of adapter; None if it is not an adapter.
        """
    @property
    def layer(self, /) -> str | None:
        """
        The layer that it is for; None if the model has no such layer.
        """
    @property
    def module(self, /) -> str:
        """
        Its name in the file.
        """
    @property
    def rank(self, /) -> int:
        """
        Its rank; 0 if it has no low-rank factors.
        """
    @property
    def scale(self, /) -> float:
        """
        The factor that tools apply.
        """
    @property
    def zero(self, /) -> bool:
        """
        Whether a factor is zero everywhere, so that the adapter has no effect.
        """

@final
class AdapterReport:
    """
    How other tools read an adapter file.

    ```python
    report = tc.verify_adapter("adapter.safetensors", "sdxl", "sdxl")
    assert report.good and "ComfyUI" in report.tools
    ```
    """
    @property
    def good(self, /) -> bool:
        """
        Whether the first of `tools` applies every module as it was trained, and every module has an effect.
        """
    @property
    def modules(self, /) -> list[AdapterModule]:
        """
        Every module, by name.
        """
    @property
    def others(self, /) -> list[str]:
        """
        Keys that are not parameters of an adapter.
        """
    @property
    def remarks(self, /) -> list[str]:
        """
        Remarks about the header.
        """
    @property
    def tools(self, /) -> list[str]:
        """
        The tools that the report covers.
        """

@final
class AdapterSet:
    """
    The adapters of a model, made by `add_adapter` or `load_adapter`.

    ```python
    unet = tc.models.load("sdxl")
    adapter = unet.add_adapter(tc.LoraConfig(r=4, target_modules="all-attention"))
    optimizer = tc.optim.AdamW(adapter.parameters(), lr=1e-4)
    adapter.save("lora.safetensors")
    ```
    """
    def __repr__(self, /) -> str: ...
    @property
    def config(self, /) -> LoraConfig:
        """
        The configuration.
        """
    def load(self, /, path: str | bytes | PathLike[str] | PathLike[bytes]) -> None:
        """
        Read the parameters of an adapter file with the same layers, ranks and alphas.

        Raises:
            MissingFileError, WeightsFormatError: if there is no such file, or it is not an adapter for this model.
            ConfigError, ShapeError: if the file does not fit the model. In this case nothing changes.
        """
    def named_parameters(self, /) -> dict[str, Var]:
        """
        The trainable parameters under peft's names ("transformer_blocks.0.attn.to_q.lora_A.weight").
        """
    def parameters(self, /) -> list[Var]:
        """
        The trainable parameters in the order of the layers.
        """
    def save(
        self,
        /,
        path: str | bytes | PathLike[str] | PathLike[bytes],
        format: str | None = None,
        metadata: dict[str, str] | None = ...,
        dtype: DType | str | None = None,
    ) -> list[str]:
        """
        Write the adapters to a safetensors file. If writing fails, no incomplete file remains.

        Args:
            path: the file.
            format: "kohya", "diffusers", "peft" or "comfyui". Default: the format that most tools load, such as "kohya"
                for SDXL, or "peft" for a model that no other tool supports.
            metadata: text entries for the file's header, in addition to those for other tools.
            dtype: the dtype of the parameters, "f32", "f16" or "bf16".

        Returns:
            The names of layers whose adapter has no effect because a factor is zero everywhere; empty if all adapters
            were trained.

        Raises:
            FileError: if the file cannot be written.
            ArgumentError: if the format is unknown or cannot hold these adapters.
        """
    def set_enabled(self, /, enabled: bool) -> None:
        """
        Enable or disable the adapters. While the adapters are disabled, the model computes exactly the results of the
        base.
        """
    def set_training(self, /, training: bool) -> None:
        """
        Set whether the adapters are in training mode, in which dropout is active.
        """

@final
class AutoencoderKL(Model):
    """
    The autoencoder between images and latents, with the results and the parameter names of diffusers' `AutoencoderKL`.
    `from_pretrained` loads one.

    ```python
    vae = tc.models.AutoencoderKL.from_pretrained("sdxl", subfolder="vae")
    mean, logvar = vae.encode(tc.zeros(1, 3, 64, 64))
    images = vae.decode(mean)
    assert images.shape == (1, 3, 64, 64)
    ```
    """
    def decode(self, /, latent: Tensor, *, tile_size: SupportsIndex | None = None) -> Tensor:
        """
        The images of latents.

        Args:
            latent: latents, (B, C, h, w), not scaled, where C is the model's number of latent channels.
            tile_size: decode larger images in tiles of this many pixels along a side (512 is usual), which overlap by a
                quarter and are blended at their seams. Memory then does not grow with the image.

        Returns:
            Images, (B, 3, h * downscale, w * downscale), values about -1 to 1.

        Raises:
            ShapeError: if the latents do not fit the model.
        """
    @property
    def downscale(self, /) -> int:
        """
        Pixels per latent along one side of an image.
        """
    def encode(
        self, /, image: Tensor, *, tile_size: SupportsIndex | None = None
    ) -> tuple[Tensor, Tensor]:
        """
        The distribution of an image's latents.

        Args:
            image: images, (B, 3, H, W), values -1 to 1.
            tile_size: encode larger images in tiles of this many pixels along a side (512 is usual), which overlap by a
                quarter. Near seams the result differs a little.

        Returns:
            Mean and logarithm of the variance of the unscaled latents, (B, C, H / downscale, W / downscale) each. C is
            the model's number of latent channels, 4 for SDXL.

        Raises:
            ShapeError: if the image does not fit the model.
        """
    @property
    def scaling_factor(self, /) -> float:
        """
        The factor of latents: a diffusion model reads (latent - shift_factor) * scaling_factor.
        """
    @property
    def shift_factor(self, /) -> float:
        """
        The shift of latents in the formula of `scaling_factor`; 0 for SDXL.
        """

@final
class AutoencoderKLQwenImage(Model):
    """
    Qwen-Image's autoencoder between images and latents, with the results of diffusers' `AutoencoderKLQwenImage` for one
    frame and its parameter names. `from_pretrained` loads one. Layers that change the number of frames are not loaded,
    and files that it writes have no such layers.
    """
    def decode(self, /, latent: Tensor, *, tile_size: SupportsIndex | None = None) -> Tensor:
        """
        The images of latents.

        Args:
            latent: latents, (B, 16, h, w), not normalised.
            tile_size: decode larger images in tiles of this many pixels along a side (512 is usual), which overlap by a
                quarter and are blended at their seams. Memory then does not grow with the image.

        Returns:
            Images, (B, 3, h * downscale, w * downscale), values -1 to 1.

        Raises:
            ShapeError: if the latents do not fit the model.
        """
    @property
    def downscale(self, /) -> int:
        """
        Pixels per latent along one side of an image.
        """
    def encode(
        self, /, image: Tensor, *, tile_size: SupportsIndex | None = None
    ) -> tuple[Tensor, Tensor]:
        """
        The distribution of an image's latents.

        Args:
            image: images, (B, 3, H, W), values -1 to 1.
            tile_size: encode larger images in tiles of this many pixels along a side (512 is usual), which overlap by a
                quarter. Near seams the result differs a little.

        Returns:
            Mean and logarithm of the variance of the latents, which are not normalised, (B, 16, H / downscale, W / downscale) each.

        Raises:
            ShapeError: if the image does not fit the model.
        """
    @property
    def latents_mean(self, /) -> list[float]:
        """
        The mean of each channel of the latents. The input of a diffusion model is (latent - latents_mean) / latents_std.
        """
    @property
    def latents_std(self, /) -> list[float]:
        """
        The standard deviation of each channel of the latents.
        """

@final
class CLIPTextModel(Model):
    """
    A text encoder with the results of transformers' `CLIPTextModel` or `CLIPTextModelWithProjection`. Names of its
    parameters begin with "text_model.", as in the published files. `from_pretrained` loads one.

    ```python
    encoder = tc.models.CLIPTextModel.from_pretrained("sdxl", subfolder="text_encoder")
    features = encoder(tc.tensor([[1, 2, 3]]))
    assert features.penultimate.shape[:2] == (1, 3)
    ```
    """
    def __call__(self, /, input_ids: Tensor) -> TextFeatures:
        """
        The features of texts.

        Args:
            input_ids: token ids, (B, S), i64 or u32, S up to 77.

        Raises:
            ShapeError: if a text is too long.
            IndexOutOfRangeError: if an id is not a token.
        """

@final
class CapturedFunction:
    """
    A function of tensors that returns a list of tensors. After its first calls, it is recorded as a CUDA graph, which
    later calls replay.
    """
    def __call__(self, /, inputs: SupportsGetItem[int, Tensor]) -> list[Tensor]:
        """
        The results of the function for `inputs`.

        Raises:
            ShapeError, DTypeError: if an input has another shape or dtype than in `static_inputs`.
            DeviceError: if the function does something that graphs do not support, such as reading a value.
        """
    def __new__(
        cls, /, function: Callable[..., Any], static_inputs: SupportsGetItem[int, Tensor]
    ) -> CapturedFunction:
        """
        Args:
            function: a function that takes as many tensors as `static_inputs` has, and returns a list of tensors.
            static_inputs: tensors with the shapes and dtypes that the inputs of every call must have.

        Raises:
            CudaUnavailableError: if CUDA cannot be used.
            AutogradError: if an input needs a gradient.
        """
    @property
    def is_recorded(self, /) -> bool:
        """
        Whether calls replay a graph.
        """

@final
class CausalLM(Model):
    """
    A language model with the results of transformers' `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM` or
    `Qwen3ForCausalLM`: Llama 2 and 3, Mistral, SmolLM2, Qwen2, Qwen2.5 and Qwen3. `from_pretrained` loads one; with `layers=` it loads only
    the first layers, to serve as a text encoder.

    The constructor makes a fresh model with the sizes in a `config.json`. Its parameters are trainable and f32.

    ```python
    lm = tc.models.CausalLM.from_pretrained("llama")
    tokens = [257, *b"upper: clavo", 256, 258]  # user, the bytes of the text, end, assistant
    (answer,) = lm.generate([tokens], max_new_tokens=8)
    ```

    Args:
        config: the path of the `config.json`.
        device: the device of the parameters.

    Raises:
        MissingFileError, ConfigError: if the configuration is missing or belongs to another model.

    Inside the model, all texts are in one packed row. A packed row has `input_ids` (N tokens), their `positions`, which
    count from 0 in each text, and `cu_seqlens`, the M + 1 bounds of M texts, which ascend from 0 to at most N. Tokens
    of a text do not attend to other texts. Tokens after the last bound are padding.
    """
    def __call__(self, /, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """
        The scores of all tokens of the vocabulary as the next token: (B, S, V) in the dtype of the weights.

        Args:
            input_ids: token ids, (B, S), i64 or u32.
            attention_mask: (B, S), i64 or u32: 1 for tokens of the text, 0 for padding, where the scores are 0.

        Raises:
            ShapeError: if an input has another shape.
            IndexOutOfRangeError: if an id is not a token, or the mask has other values than 0 and 1.
            DTypeError: if an input is not of integers.
            ArgumentError: if only a part of the layers was loaded.
        """
    def __new__(
        cls, /, config: str | bytes | PathLike[str] | PathLike[bytes], device: str = "cpu"
    ) -> CausalLM: ...
    @property
    def eos_token_ids(self, /) -> list[int]:
        """
        The tokens that end a text, as `config.json` says.
        """
    def extend(
        self, /, cache: KVCache, tokens: SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]]
    ) -> Tensor:
        """
        Add tokens to the texts of a cache, and compute the scores of the next token of each text that got tokens:
        (texts, V), in the order of the texts.

        The scores equal those of a forward pass over the whole texts, but the model usually computes only the new
        tokens.

        Args:
            cache: the cache with the texts.
            tokens: the new token ids of each text; an empty list for a text that gets none.

        Raises:
            IndexOutOfRangeError: if an id is not a token.
            ArgumentError: if the numbers of texts differ, no text gets a token, or only a part of the layers was loaded.
        """
    def generate(
        self,
        /,
        prompts: SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]],
        *,
        max_new_tokens: SupportsIndex = 128,
        temperature: SupportsFloat | SupportsIndex = ...,
        top_k: SupportsIndex = 0,
        top_p: SupportsFloat | SupportsIndex = ...,
        min_p: SupportsFloat | SupportsIndex = ...,
        repetition_penalty: SupportsFloat | SupportsIndex = ...,
        stop_token_ids: SupportsGetItem[int, SupportsIndex] | None = None,
        seed: SupportsIndex = 0,
    ) -> list[list[int]]:
        """
        Generate tokens after each prompt. The result has the new tokens, without the token that ends the text.

        Texts do not influence each other and are not padded; their keys and values are cached. A drawn token depends
        only on the scores, the seed, the index of the text and the position in the text.

        Args:
            prompts: the token ids of each text, at least one each.
            max_new_tokens: the largest number of tokens that are added to each text.
            temperature: 0 always chooses the most likely token; otherwise scores are divided by the temperature and a
                token is drawn.
            top_k: draw only from this many most likely tokens; 0 draws from all.
            top_p: draw only from the most likely tokens that together have this probability, above 0 and up to 1.
            min_p: draw only from tokens whose probability is at least this fraction of the most likely token's, 0 to 1.
            repetition_penalty: a number above 1 makes tokens that are already in the text less likely.
            stop_token_ids: the tokens that end a text; default: `eos_token_ids`.
            seed: the seed of the random draws.

        Raises:
            IndexOutOfRangeError: if an id is not a token.
            ArgumentError: if a prompt is empty, a number out of range, or only a part of the layers was loaded.
            NonFiniteError: if the model's scores are non-finite.
        """
    def hidden(self, /, input_ids: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Tensor:
        """
        The states of a packed row that the head reads, after the final norm: (N, D).

        Args:
            input_ids: token ids, (N), i64 or u32.
            positions: the position of each token in its text, (N), i64 or u32.
            cu_seqlens: the bounds of the texts, (M + 1), i64 or u32.

        Raises:
            ShapeError, DTypeError: if an input does not fit.
            IndexOutOfRangeError: if an id is not a token, or a bound is out of order or range.
            ArgumentError: if only a part of the layers was loaded.
        """
    def hidden_states(
        self,
        /,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        layers: SupportsGetItem[int, SupportsIndex] | None = None,
    ) -> list[Tensor]:
        """
        The states after some layers, numbered as in transformers: 0 is the embedding, i the result of layer i. Later
        layers are not computed. Unlike in transformers, the last layer's states are before the final norm.

        Args:
            input_ids: token ids, (B, S), i64 or u32.
            attention_mask: (B, S), i64 or u32: 1 for tokens of the text, 0 for padding, where the states are 0.
            layers: the numbers of the states to return, from 0 to the number of layers that were loaded; default: the
                last layer's.

        Returns:
            (B, S, D) for each of `layers`.

        Raises:
            ShapeError, DTypeError: if an input does not fit.
            IndexOutOfRangeError: if an id is not a token, or the mask has other values than 0 and 1.
            ArgumentError: if the model has fewer layers.
        """
    def log_probs(
        self, /, input_ids: Tensor, targets: Tensor, positions: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        """
        The logarithm of the probability of each target of a packed row: (N) in f32, 0 where the target is -100. Forward
        and backward are computed without a matrix of all scores.

        Args:
            input_ids, targets, positions, cu_seqlens: as for `packed_loss`.

        Raises:
            As `packed_loss`.
        """
    def logits(self, /, hidden: Tensor) -> Tensor:
        """
        The scores of the next token, (..., V), for states (..., D) of `hidden`.

        Raises:
            ShapeError: if the states have another width.
            ArgumentError: if only a part of the layers was loaded.
        """
    def loss(
        self, /, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """
        The mean loss of predicting each label from the tokens before it: a scalar in f32, computed without a matrix of
        all scores.

        Args:
            input_ids: token ids, (B, S), i64 or u32.
            labels: (B, S), i64: the ids themselves, or -100 for tokens that are ignored. The model shifts them by one
                token. The mean is over the labels that are not ignored; it is 0 if all are.
            attention_mask: (B, S), i64 or u32: 1 for tokens of the text, 0 for padding.

        Raises:
            ShapeError, DTypeError: if an input does not fit.
            IndexOutOfRangeError: if an id or a label is not a token, or the mask has other values than 0 and 1.
            ArgumentError: if only a part of the layers was loaded.
        """
    @property
    def max_position_embeddings(self, /) -> int:
        """
        The longest text that the model is made for, in tokens.
        """
    @property
    def num_hidden_layers(self, /) -> int:
        """
        The number of layers that were loaded.
        """
    def packed_loss(
        self,
        /,
        input_ids: Tensor,
        targets: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor,
        weights: Tensor | None = None,
    ) -> Tensor:
        """
        The sum of the losses of a packed row: a scalar in f32, computed without a matrix of all scores.

        Args:
            input_ids: token ids, (N), i64 or u32.
            targets: the target of each token, (N), i64: the id of the next token of its text, or -100 for tokens that
                are ignored.
            positions: the position of each token in its text, (N), i64 or u32.
            cu_seqlens: the bounds of the texts, (M + 1), i64 or u32.
            weights: factors of the losses, (N), f32.

        Raises:
            ShapeError, DTypeError: if an input does not fit.
            IndexOutOfRangeError: if an id or a target is not a token, or a bound is out of order or range.
            ArgumentError: if only a part of the layers was loaded.
        """
    def padded_states(
        self,
        /,
        input_ids: Tensor,
        words: SupportsIndex,
        layers: SupportsGetItem[int, SupportsIndex],
    ) -> list[Tensor]:
        """
        The states of one text and the padding that follows it, as in `hidden_states`. Padding tokens attend to every word but not to
        padding tokens, like masked tokens in transformers.

        Args:
            input_ids: token ids, (N), i64 or u32.
            words: the number of tokens, from the first on, that are words of the text: 1 to N.
            layers: the numbers of the states to return, as in `hidden_states`; at least one.

        Returns:
            For each of `layers` the states, (N, D).

        Raises:
            ShapeError, DTypeError: if an input does not fit.
            IndexOutOfRangeError: if an id is not a token.
            ArgumentError: if there are no words or more words than tokens, or if the model has fewer layers.
        """
    def stream(
        self,
        /,
        prompts: SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]],
        *,
        max_new_tokens: SupportsIndex = 128,
        temperature: SupportsFloat | SupportsIndex = ...,
        top_k: SupportsIndex = 0,
        top_p: SupportsFloat | SupportsIndex = ...,
        min_p: SupportsFloat | SupportsIndex = ...,
        repetition_penalty: SupportsFloat | SupportsIndex = ...,
        stop_token_ids: SupportsGetItem[int, SupportsIndex] | None = None,
        seed: SupportsIndex = 0,
    ) -> Generation:
        """
        As `generate`, but return an iterator over the steps. Each item is a list with the new token of every text, None
        for texts that have ended.

        Args:
            prompts, max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop_token_ids, seed: as for `generate`.

        Raises:
            As `generate`. Errors of the model are raised at the first step.
        """
    @property
    def vocab_size(self, /) -> int:
        """
        The number of tokens that the embedding has rows for.
        """

@final
class CheckpointFacts:
    """
    The contents of a checkpoint, according to its headers and configurations.

    ```python
    facts = tc.inspect("sdxl")
    assert (facts.model, facts.prediction_type) == ("sdxl", "epsilon")
    assert sorted(facts.parts) == ["text_encoder", "text_encoder_2", "unet", "vae"]
    ```
    """
    @property
    def factor(self, /) -> int | None:
        """
        Pixels per latent along one side of an image, if there is an autoencoder.
        """
    @property
    def model(self, /) -> str | None:
        """
        The family of the models, by its name on the command line; None for a model that belongs to no family.
        """
    @property
    def parts(self, /) -> dict[str, PartFacts]:
        """
        The models by the names of their folders. A model without a pipeline has an empty name.
        """
    @property
    def prediction_type(self, /) -> str | None:
        """
        "epsilon" or "v_prediction", if the files state it.
        """
    @property
    def resolution(self, /) -> int | None:
        """
        Height and width in pixels of the images that the model was made for, if it generates images.
        """
    @property
    def zero_snr(self, /) -> bool:
        """
        Whether the files state that the last timestep is pure noise.
        """

@final
class ChromaTransformer(Model):
    """
    The transformer of Chroma, with the results and the parameter names of diffusers' `ChromaTransformer2DModel`.
    `from_pretrained` loads one.
    """
    def __call__(
        self,
        /,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor | float | int,
        img_ids: Tensor,
        txt_ids: Tensor,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """
        The velocity (noise minus latents) that the model predicts for noisy latents.

        Args:
            hidden_states: noisy latents as tokens, (B, S, in_channels): each token is a square of 2 x 2 latents,
                channels first.
            encoder_hidden_states: the text's features from T5, (B, L, joint_attention_dim): those of the words and one
                token of padding.
            timestep: the time from 0 (clean) to 1 (noise): (B,), (1,), or a number.
            img_ids: positions of the image's tokens, (S, 3): 0, row, column.
            txt_ids: positions of the text's tokens, (L, 3): zeros.
            lengths: the number of tokens of each text that attention reads, (B,), f32, at least 1. By default attention
                reads all tokens and needs no mask, which saves time.

        Returns:
            A tensor of the shape of `hidden_states`, in the dtype of the weights.

        Raises:
            ShapeError: if the inputs do not fit the model or one another.
        """

@final
class DType:
    """
    The type of a tensor's elements.

    A dtype equals its names: `t.dtype == "bf16"`, `t.dtype == "bfloat16"`, `t.dtype == tc.bfloat16`. A name works
    wherever a dtype is expected.

    ```python
    dtype = tc.zeros(2).dtype
    assert dtype == tc.float32 == "f32"
    assert tc.zeros(2).to(tc.bfloat16).dtype == "bf16"
    ```

    Args:
        name: "f32", "f16", "bf16", "f64", "u8", "u32" or "i64", or torch's name ("float32", "bfloat16", ...).

    Raises:
        DTypeError: if the name is unknown.
    """
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int:
        """
        The hash of the short name, so that `{"f32": ...}[t.dtype]` finds its entry.
        """
    def __new__(cls, /, name: DType | str) -> DType: ...
    def __reduce__(self, /) -> tuple[Any, ...]: ...
    def __repr__(self, /) -> str: ...
    def __str__(self, /) -> str: ...
    @property
    def is_floating_point(self, /) -> bool:
        """
        Whether this dtype is floating point; only floating-point values can have gradients.
        """
    @property
    def itemsize(self, /) -> int:
        """
        Bytes of one element.
        """
    @property
    def name(self, /) -> str:
        """
        The short name, such as "bf16".
        """

@final
class DiffusionObjective:
    """
    The objective of diffusion models such as SDXL, which predict the noise or the velocity of noised latents.

    ```python
    objective = tc.train.DiffusionObjective(tc.train.NoiseSchedule(), min_snr_gamma=5.0)
    noised = objective.noise(tc.randn(2, 4, 8, 8))
    prediction = tc.zeros(2, 4, 8, 8)  # of a model, for noised.sample at noised.timesteps
    loss = objective.loss(prediction, noised)
    ```

    Args:
        schedule: the noise schedule of the model's training.
        timesteps: the distribution of timesteps, "uniform", "logit_normal" or "mode" (arXiv:2403.03206).
        logit_mean: mean of the normal distribution of "logit_normal"; a positive mean favours noisy timesteps.
        logit_std: standard deviation of that normal distribution, above 0.
        shift: shifts timesteps towards noise (above 1) or data (below 1); 1 changes nothing.
        min_timestep: the first timestep that may be drawn.
        max_timestep: the timestep after the last one that may be drawn; with None, all later timesteps of the schedule
            may be drawn.
        min_snr_gamma: weights timesteps by min(SNR, gamma) / SNR, or by min(SNR, gamma) / (SNR + 1) for velocities
            (arXiv:2303.09556). The paper uses 5; with None all timesteps have the same weight.
        noise_offset: the amount of noise that is constant over each channel of an example, 0 to about 0.1.
        multires_noise_iterations: the largest number of levels of multiresolution noise. A level is normal noise,
            enlarged to the size of the latents and added; each level has a lower resolution than the level before it.
            The sum is scaled to standard deviation 1 over an example. 0 adds no levels; 6 to 10 are usual.
        multires_noise_discount: the factor of each level relative to the level before it, above 0 and below 1.
        loss: the loss of an element: "mse", "l1", "huber" (torch's huber_loss) or "smooth_l1" (the Huber loss divided
            by delta).
        huber_delta: the delta of the Huber losses, above 0. The losses are linear for differences above delta.
        huber_schedule: how delta depends on the timestep t of T (arXiv:2403.16728): "constant", "exponential" (delta ** (t / T)) or
            "snr" ((1 - delta) / (1 + sigma) ** 2 + delta).
        device: the device of the latents.

    Raises:
        ArgumentError: if a name is unknown, if a number is out of range, or if the schedule ends in pure noise and the
            model predicts noise.
    """
    def __new__(
        cls,
        /,
        schedule: NoiseSchedule,
        *,
        timesteps: str = "uniform",
        logit_mean: SupportsFloat | SupportsIndex = ...,
        logit_std: SupportsFloat | SupportsIndex = ...,
        shift: SupportsFloat | SupportsIndex = ...,
        min_timestep: SupportsIndex = 0,
        max_timestep: SupportsIndex | None = None,
        min_snr_gamma: SupportsFloat | SupportsIndex | None = ...,
        noise_offset: SupportsFloat | SupportsIndex = ...,
        multires_noise_iterations: SupportsIndex = 0,
        multires_noise_discount: SupportsFloat | SupportsIndex = ...,
        loss: str = "mse",
        huber_delta: SupportsFloat | SupportsIndex = ...,
        huber_schedule: str = "constant",
        device: str = "cpu",
    ) -> DiffusionObjective: ...
    def loss(
        self,
        /,
        prediction: Tensor,
        noised: NoisedLatents,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """
        The loss of a prediction. An example's loss is its mean loss over elements, times its weights; the result is the
        mean over the batch.

        Args:
            prediction: the model's output for `noised.sample` at `noised.timesteps`.
            noised: from `noise`, `noise_at` or `validation_noise`.
            mask: the weights of the positions of an example, (B, 1, ...) in the size of the latents, at least 0. The
                mask is divided by its mean over the example, so that its area does not change the example's weight. An
                example whose mask is 0 everywhere has loss 0.
            weights: (B,), the weights of the examples, such as the prior's weight for regularisation images.

        Returns:
            One element, f32.

        Raises:
            ShapeError, DTypeError, DeviceError: if something does not fit.
        """
    def noise(
        self,
        /,
        latents: Tensor,
        samples: SupportsGetItem[int, SupportsIndex] | None = None,
        seed: SupportsIndex = 0,
    ) -> NoisedLatents:
        """
        Add noise to latents, each example at its own timestep.

        Args:
            latents: (B, C, ...).
            samples: the number of each sample in the run. Noise and timestep then depend only on this number and
                `seed`, and the library's generator does not advance. By default they come from that generator.
            seed: the run's seed.

        Raises:
            ShapeError, DTypeError, DeviceError: if the latents do not fit, or if there is not one number for each
                example.
        """
    def noise_at(self, /, latents: Tensor, noise: Tensor, timesteps: Tensor) -> NoisedLatents:
        """
        Add given noise to latents at given timesteps.

        Args:
            latents: (B, C, ...).
            noise: in the shape of the latents.
            timesteps: (B,), integers.

        Raises:
            ShapeError, DTypeError, DeviceError: if the three tensors do not fit together.
            IndexOutOfRangeError: if there is no such timestep.
        """
    def validation_noise(
        self,
        /,
        latents: Tensor,
        examples: SupportsGetItem[int, SupportsIndex],
        seed: SupportsIndex = 0,
    ) -> NoisedLatents:
        """
        Add noise to latents for a validation loss. An example has the same noise and timestep every time, in any batch,
        and the library's generator does not advance. Timesteps are spread evenly, so that examples with consecutive numbers cover the whole
        range.

        Args:
            latents: (B, C, ...).
            examples: the number of each example, from 0.
            seed: selects the noise.

        Raises:
            ShapeError: if there is not a number for each example.
        """

@final
class DigitsTransformer(Model):
    """
    The demo's image generator: a flow-matching diffusion transformer over images of handwritten digits.

    The constructor makes a fresh model whose parameters are trainable; `from_pretrained` loads a frozen one.

    ```python
    digits = tc.models.DigitsTransformer(num_layers=1)
    velocity = digits(tc.randn(2, 1, 8, 8), tc.tensor([1000.0, 500.0]), tc.tensor([3, 7]))
    assert velocity.shape == (2, 1, 8, 8)
    ```

    Args:
        sample_size: height and width of an image in pixels.
        patch_size: height and width of the square that becomes one token.
        num_layers: number of blocks.
        num_attention_heads: heads of each attention.
        attention_head_dim: width of each head.
        mlp_ratio: width of the middle of a block's feed-forward network, as a multiple of the model's width.
        num_classes: number of classes.
        device: the device of the parameters.

    Raises:
        ConfigError: if the sizes do not fit together.
    """
    def __call__(self, /, sample: Tensor, timestep: Tensor, class_labels: Tensor) -> Tensor:
        """
        The velocity `noise - image` of flow matching.

        Args:
            sample: noisy images, (B, 1, H, W), values about -1 to 1.
            timestep: noise levels from 0 (image) to 1000 (noise), (B,).
            class_labels: the class of each image, (B,), i64 or u32.

        Returns:
            A tensor of the shape of `sample`.

        Raises:
            ShapeError: if the inputs do not fit the model or one another.
            IndexOutOfRangeError: if a label is not a class.
        """
    def __new__(
        cls,
        /,
        *,
        sample_size: SupportsIndex = 8,
        patch_size: SupportsIndex = 2,
        num_layers: SupportsIndex = 3,
        num_attention_heads: SupportsIndex = 3,
        attention_head_dim: SupportsIndex = 32,
        mlp_ratio: SupportsIndex = 3,
        num_classes: SupportsIndex = 10,
        device: str = "cpu",
    ) -> DigitsTransformer: ...

@final
class EMA:
    """
    The exponential moving average of an adapter's parameters. Call `update` after each step of the optimizer. Inside
    `with ema:` the adapter computes with the averages, and saving the adapter writes the averages.

    ```python
    digits = tc.models.DigitsTransformer()
    adapter = digits.add_adapter(tc.LoraConfig(r=2, target_modules="all-linear"))
    ema = tc.optim.EMA(adapter, decay=0.99)
    ema.update()  # after each step of the optimizer
    with ema:
        adapter.save("averaged.safetensors")
    ```

    Args:
        adapter: the adapter from `add_adapter`.
        decay: weight of the old average in each update, in [0, 1).
        warmup: use min(decay, (1 + n) / (10 + n)) after n updates, so that the initial values soon lose their weight.

    Raises:
        ArgumentError: if the decay is out of range.
        DTypeError: if the parameters are not f32.
    """
    def __enter__(self, /) -> EMA: ...
    def __exit__(self, /, *exception: object) -> None: ...
    def __new__(
        cls, /, adapter: AdapterSet, decay: SupportsFloat | SupportsIndex = ..., warmup: bool = True
    ) -> EMA: ...
    def __repr__(self, /) -> str: ...
    @property
    def decay(self, /) -> float:
        """
        The weight of the old average in the next update.
        """
    @property
    def is_swapped_in(self, /) -> bool:
        """
        Whether the averages replace the parameters.
        """
    def load_state_dict(self, /, state: dict[str, Tensor]) -> None:
        """
        Load a state that was saved for an adapter with the same shapes.

        Raises:
            ConfigError: if an entry is missing or not expected. In this case nothing changes.
            ShapeError, DTypeError: if an entry has another shape or dtype. In this case nothing changes.
        """
    def state_dict(self, /) -> dict[str, Tensor]:
        """
        A copy of the state: `INDEX.average` is the average of the parameter with that index, and `updates` (i64) the
        number of updates.
        """
    def swap_in(self, /) -> None:
        """
        Replace the parameters by the averages.

        Raises:
            ArgumentError: if the averages already replace them.
        """
    def swap_out(self, /) -> None:
        """
        Restore the parameters, bit for bit.

        Raises:
            ArgumentError: if the averages do not replace them.
        """
    def update(self, /) -> None:
        """
        Update the averages with the parameters.

        Raises:
            ArgumentError: while the averages replace the parameters.
        """
    @property
    def updates(self, /) -> int:
        """
        The number of calls of `update`.
        """

@final
class FlowMatching:
    """
    The flow-matching objective: the model receives (1 - s) * data + s * noise and predicts noise - data.

    ```python
    flow = tc.train.FlowMatching("logit_normal", shift=3.0)
    sample, levels, target = flow.noise(tc.randn(2, 16, 8, 8))
    loss = F.mse_loss(tc.zeros(2, 16, 8, 8), target)
    assert flow.sigmas(4)[0] == 1.0
    ```

    Args:
        distribution: the distribution of noise levels s in (0, 1), "uniform", "logit_normal" or "mode" (arXiv:2403.03206).
        shift: moves levels towards noise (above 1) or data (below 1); 1 changes nothing.

    Raises:
        ArgumentError: if the distribution is unknown or the shift is not above 0.
    """
    def __new__(
        cls, /, distribution: str = "uniform", shift: SupportsFloat | SupportsIndex = ...
    ) -> FlowMatching: ...
    def euler_step(
        self,
        /,
        sample: Tensor,
        velocity: Tensor,
        sigma: SupportsFloat | SupportsIndex,
        next_sigma: SupportsFloat | SupportsIndex,
    ) -> Tensor:
        """
        One step of Euler's method along a velocity.

        Args:
            sample: the sample at noise level `sigma`.
            velocity: the model's output for `sample` at `sigma`, in the shape of `sample`.
            sigma: the noise level.
            next_sigma: the next noise level.

        Returns:
            sample + (next_sigma - sigma) * velocity.

        Raises:
            ShapeError: if the shapes differ.
        """
    def noise(
        self,
        /,
        data: Tensor,
        samples: SupportsGetItem[int, SupportsIndex] | None = None,
        seed: SupportsIndex = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """
        Add noise to a batch of data, each example at its own level.

        Args:
            data: (B, ...).
            samples: the number of each sample in the run. Noise and level then depend only on this number and `seed`,
                and the library's generator does not advance. By default they come from that generator.
            seed: the run's seed.

        Returns:
            The noised data, the noise levels (B,) in f32, and the target of the prediction (noise - data).

        Raises:
            ShapeError: if the data has no dimension, or there is not a number for each example.
        """
    def sigmas(self, /, steps: SupportsIndex) -> list[float]:
        """
        The noise levels of `steps` sampling steps: `steps + 1` numbers from 1 down to 0.

        Raises:
            ArgumentError: if there are no steps.
        """
    def validation_noise(
        self,
        /,
        data: Tensor,
        examples: SupportsGetItem[int, SupportsIndex],
        seed: SupportsIndex = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """
        Add noise to data for a validation loss. An example has the same noise and level every time, in any batch, and
        the library's generator does not advance.

        Args:
            data: (B, ...).
            examples: the number of each example, from 0.
            seed: selects the noise.

        Returns:
            As `noise`.

        Raises:
            ShapeError: if there is not a number for each example.
        """

@final
class Flux2Transformer(Model):
    """
    The transformer of FLUX.2, with the results and the parameter names of diffusers' `Flux2Transformer2DModel`.
    `from_pretrained` loads one.
    """
    def __call__(
        self,
        /,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor | float | int,
        img_ids: Tensor,
        txt_ids: Tensor,
        guidance: Tensor | float | int | None = None,
    ) -> Tensor:
        """
        The velocity (noise minus latents) that the model predicts for noisy latents.

        Args:
            hidden_states: noisy latents as tokens, (B, S, in_channels): each token is a square of 2 x 2 latents,
                channels first.
            encoder_hidden_states: the text's tokens, (B, L, joint_attention_dim).
            timestep: the time from 0 (clean) to 1 (noise): (B,), (1,), or a number.
            img_ids: positions of the image's tokens, (S, 4): 0, row, column, 0.
            txt_ids: positions of the text's tokens, (L, 4): 0, 0, 0, index.
            guidance: the scale of guidance, (B,), (1,), or a number. Only models with guidance (FLUX.2-dev) take it.

        Returns:
            A tensor of the shape of `hidden_states`, in the dtype of the weights.

        Raises:
            ShapeError: if the inputs do not fit the model or one another.
            ArgumentError: if the model takes guidance and gets none, or gets guidance that it does not take.
        """

@final
class FluxTransformer(Model):
    """
    The transformer of Flux.1, with the results and the parameter names of diffusers' `FluxTransformer2DModel`.
    `from_pretrained` loads one.
    """
    def __call__(
        self,
        /,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        pooled_projections: Tensor,
        timestep: Tensor | float | int,
        img_ids: Tensor,
        txt_ids: Tensor,
        guidance: Tensor | float | int | None = None,
    ) -> Tensor:
        """
        The velocity (noise minus latents) that the model predicts for noisy latents.

        Args:
            hidden_states: noisy latents as tokens, (B, S, in_channels): each token is a square of 2 x 2 latents,
                channels first.
            encoder_hidden_states: the text's tokens, (B, L, joint_attention_dim).
            pooled_projections: the pooled text, (B, pooled_projection_dim).
            timestep: the time from 0 (clean) to 1 (noise): (B,), (1,), or a number.
            img_ids: positions of the image's tokens, (S, 3): 0, row, column.
            txt_ids: positions of the text's tokens, (L, 3): zeros.
            guidance: the scale of guidance, (B,), (1,), or a number: 1 in training, about 3.5 for sampling. Only models
                with guidance (Flux.1-dev) take it.

        Returns:
            A tensor of the shape of `hidden_states`, in the dtype of the weights.

        Raises:
            ShapeError: if the inputs do not fit the model or one another.
            ArgumentError: if the model takes guidance and gets none, or gets guidance that it does not take.
        """

@final
class Generation:
    """
    Generation of several texts: an iterator over steps, each of which adds one token to every text. The item of a step
    is a list with the new token of every text, None for texts that have ended. Iteration stops when all texts have
    ended. `CausalLM.stream` makes one.

    ```python
    lm = tc.models.CausalLM.from_pretrained("llama")
    for tokens in lm.stream([[257, 104, 105], [257, 97]], max_new_tokens=4):
        assert len(tokens) == 2
    ```
    """
    def __iter__(self, /) -> Generation: ...
    def __next__(self, /) -> list[int | None]: ...
    def end(self, /, text: SupportsIndex) -> None:
        """
        End text number `text`; the others continue.

        Raises:
            ArgumentError: if there is no such text.
        """

@final
class GradScaler:
    """
    Scales the loss so that f16 gradients do not vanish, and skips steps whose gradients overflowed, as
    `torch.amp.GradScaler` does.

    An iteration calls `scaler.scale(loss).backward()`, then optionally `scaler.unscale_(opt)` and clipping, then
    `scaler.step(opt)` and `scaler.update()`.

    ```python
    scaler = tc.optim.GradScaler()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    tc.optim.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    ```

    Args:
        init_scale: the scale at the beginning, above 0.
        growth_factor: the scale is multiplied by this after `growth_interval` steps in a row with finite gradients;
            above 1.
        backoff_factor: the scale is multiplied by this after a step with an infinity or a NaN; in (0, 1).
        growth_interval: the number of steps in a row with finite gradients before the scale grows.
        enabled: if False, the scaler changes neither losses nor gradients and takes every step.

    Raises:
        ArgumentError: if a number is out of range.
    """
    def __new__(
        cls,
        /,
        init_scale: SupportsFloat | SupportsIndex = ...,
        growth_factor: SupportsFloat | SupportsIndex = ...,
        backoff_factor: SupportsFloat | SupportsIndex = ...,
        growth_interval: SupportsIndex = 2000,
        enabled: bool = True,
    ) -> GradScaler: ...
    def get_scale(self, /) -> float:
        """
        The current scale; 1 if the scaler is not enabled. Waits for a CUDA device.
        """
    def load_state_dict(self, /, state: dict[str, SupportsFloat | SupportsIndex]) -> None:
        """
        Continue from the result of `state_dict`.

        Raises:
            ConfigError: if an entry is missing.
            ArgumentError: if the scale is not a number above 0.
        """
    def scale(self, /, loss: Tensor) -> Tensor:
        """
        The loss times the scale.
        """
    def state_dict(self, /) -> dict[str, float]:
        """
        The scale (`scale`) and the number of steps in a row with finite gradients (`growth_tracker`). Waits for a CUDA
        device.
        """
    def step(self, /, optimizer: Optimizer) -> bool | None:
        """
        Unscale the gradients, unless `unscale_` has done so. Then let the optimizer step, unless a gradient is
        non-finite.

        Returns:
            Whether the step was taken; None on a CUDA device, because the answer would need synchronization.

        Raises:
            ArgumentError: if it was already called for this optimizer since the last `update`.
        """
    def unscale_(self, /, optimizer: Optimizer) -> None:
        """
        Divide the gradients of the optimizer's variables by the scale, to clip or read them before the step.

        Raises:
            ArgumentError: if it was already called for this optimizer since the last `update`.
        """
    def update(self, /) -> None:
        """
        End the iteration: the scale falls after a skipped step, and grows after `growth_interval` steps in a row with
        finite gradients.

        Raises:
            ArgumentError: if no optimizer was unscaled or stepped since the last call.
        """

@final
class KVCache:
    """
    Texts that `CausalLM.extend` continues, with the keys and values of their tokens.

    ```python
    lm = tc.models.CausalLM.from_pretrained("llama")
    cache = tc.models.KVCache(1)
    scores = lm.extend(cache, [[257, 104]])
    scores = lm.extend(cache, [[105]])  # computes this token alone
    assert cache.tokens(0) == [257, 104, 105]
    ```

    Args:
        texts: the number of texts.
    """
    def __len__(self, /) -> int: ...
    def __new__(cls, /, texts: SupportsIndex) -> KVCache: ...
    def tokens(self, /, text: SupportsIndex) -> list[int]:
        """
        The tokens of text number `text`.

        Raises:
            ArgumentError: if there is no such text.
        """

@disjoint_base
class LoraConfig:
    """
    The configuration of adapters: which layers get them, and their kind and size. The names of fields are peft's.

    An entry that selects layers is the whole name of a layer, the end of its name after a dot ("to_q", "to_out.0"), or
    a regular expression for the whole name. "all-linear" selects every linear layer, "all-conv" every convolution, and
    "all-attention" the projections of attention.

    ```python
    config = tc.LoraConfig(r=16, lora_alpha=16, target_modules=["to_q", "to_v"], rank_pattern={"to_v": 4})
    assert config.select({"mid.to_q": (8, 8), "mid.to_v": (8, 8), "mid.to_k": (8, 8)}) == {"mid.to_q": 16, "mid.to_v": 4}
    ```

    Args:
        r: rank, at least 1.
        lora_alpha: numerator of the scale, lora_alpha / r.
        target_modules: the layers that get an adapter.
        exclude_modules: layers that get no adapter although `target_modules` selects them.
        lora_dropout: probability of dropping an element of an adapter's input while training, in [0, 1).
        use_dora: whether adapters are weight-decomposed (DoRA) instead of LoRA.
        use_rslora: whether the scale is lora_alpha / sqrt(r).
        rank_pattern: ranks that differ from `r`, by name of layers.
        alpha_pattern: alphas that differ from `lora_alpha`, by name of layers.
        adapter: the kind of adapter: "lora", "dora", "loha", "lokr" or "oft". OFT has no rank, so it ignores `r` and
            `lora_alpha`.
        wd_on_output: whether DoRA has one magnitude for each output, as in the paper, instead of one for each input.
        decompose_both: whether LoKr's smaller factor may be low-rank, too.
        decompose_factor: the size of LoKr's smaller factor; -1 chooses a size near the square root of the layer's size.
        oft_block_size: the size of the blocks that OFT rotates. If it does not divide a layer's number of features, OFT uses the nearest
            divisor.
        oft_side: "input" if OFT rotates the inputs of layers, as in peft; "output" if it rotates their outputs, as in
            LyCORIS and ComfyUI. The default depends on the default file format of the model's adapters: "input" for
            peft's format, "output" for the others.
        use_cayley_neumann: whether OFT of inputs computes a Neumann series in place of the Cayley transform, as peft
            does by default.
        num_cayley_neumann_terms: the number of terms of that series, at least 2.
        qat: the format for quantization-aware training, "int8", "int4", "fp8" or "nf4". Every forward pass rounds the
            adapted weights of linear layers to this format, as `nn.functional.fake_quantize` does.
        qat_activations: whether the inputs of the layers whose weights are rounded are rounded too, with a scale per
            token; needs `qat` "int8" or "fp8".
        qat_learned_scales: whether each scale of the weights is multiplied by a learned factor, which starts at 1.
        dtype: the dtype of the parameters in training, "f32", or "bf16" for an optimizer with `stochastic_rounding`.
        peft: other arguments of peft's class, with values that mean what happens here, such as `bias="none"`.

    Raises:
        ConfigError: if a value is out of range, or an argument of peft asks for something else than what happens here.
        TypeError: if there is no such argument.
    """
    @classmethod
    def __init_subclass__(cls, /) -> None: ...
    def __new__(
        cls,
        /,
        r: SupportsIndex = 8,
        lora_alpha: SupportsFloat | SupportsIndex = ...,
        target_modules: str | Sequence[str] | None = None,
        exclude_modules: str | Sequence[str] | None = None,
        lora_dropout: SupportsFloat | SupportsIndex = ...,
        use_dora: bool = False,
        use_rslora: bool = False,
        rank_pattern: dict[str, SupportsIndex] | None = None,
        alpha_pattern: dict[str, SupportsFloat | SupportsIndex] | None = ...,
        adapter: str = "lora",
        wd_on_output: bool = True,
        decompose_both: bool = False,
        decompose_factor: SupportsIndex = -1,
        oft_block_size: SupportsIndex = 32,
        oft_side: str | None = None,
        use_cayley_neumann: bool = False,
        num_cayley_neumann_terms: SupportsIndex = 5,
        qat: str | None = None,
        qat_activations: bool = False,
        qat_learned_scales: bool = False,
        dtype: DType | str | None = None,
        **peft: object,
    ) -> LoraConfig: ...
    def __reduce__(self, /) -> tuple[Any, ...]: ...
    def __repr__(self, /) -> str: ...
    @property
    def adapter(self, /) -> str:
        """
        The kind of adapter.
        """
    @property
    def alpha_pattern(self, /) -> dict[str, float]:
        """
        Alphas that differ from `lora_alpha`, by name of layers.
        """
    @property
    def decompose_both(self, /) -> bool:
        """
        Whether the smaller factor of LoKr may be low-rank, too.
        """
    @property
    def decompose_factor(self, /) -> int:
        """
        The size of LoKr's smaller factor; -1 chooses a size near the square root of the layer's size.
        """
    @property
    def dtype(self, /) -> DType:
        """
        The dtype of the parameters in training.
        """
    @property
    def exclude_modules(self, /) -> list[str]:
        """
        Layers that get no adapter although `target_modules` selects them.
        """
    @property
    def lora_alpha(self, /) -> float:
        """
        The numerator of the scale.
        """
    @property
    def lora_dropout(self, /) -> float:
        """
        The probability of dropping an element of an adapter's input while training.
        """
    @property
    def num_cayley_neumann_terms(self, /) -> int:
        """
        The number of terms of the series that OFT computes in place of the Cayley transform.
        """
    @property
    def oft_block_size(self, /) -> int:
        """
        The size of the blocks that OFT rotates.
        """
    @property
    def oft_side(self, /) -> str | None:
        """
        The side of layers that OFT rotates: "input" or "output"; None for the default.
        """
    def plan(
        self, /, layers: dict[str, SupportsGetItem[int, SupportsIndex]], optimizer: str
    ) -> tuple[int, int]:
        """
        The memory that the adapters need: the number of elements of their parameters, and the bytes of an optimizer's
        states. With `dtype` "bf16", the optimizer rounds stochastically.

        Args:
            layers: as for `select`.
            optimizer: the name of an optimizer in lower case, such as "adamw8bit".

        Raises:
            ConfigError: if there is no such optimizer, or a pattern is not a regular expression.
            ShapeError: if a shape cannot be that of a layer's weight.
        """
    @property
    def qat(self, /) -> str | None:
        """
        The format to which adapted weights are rounded in quantization-aware training, if any.
        """
    @property
    def qat_activations(self, /) -> bool:
        """
        Whether the inputs of layers whose weights are rounded are rounded too.
        """
    @property
    def qat_learned_scales(self, /) -> bool:
        """
        Whether each scale of the weights is multiplied by a learned factor.
        """
    @property
    def r(self, /) -> int:
        """
        The rank.
        """
    @property
    def rank_pattern(self, /) -> dict[str, int]:
        """
        Ranks that differ from `r`, by name of layers.
        """
    def select(self, /, layers: dict[str, SupportsGetItem[int, SupportsIndex]]) -> dict[str, int]:
        """
        The layers that get an adapter, with their ranks.

        Args:
            layers: the shapes of the layers' weights in files, (out, in) or (out, in, height, width), by name.

        Raises:
            ConfigError: if a pattern is not a regular expression.
        """
    @property
    def target_modules(self, /) -> list[str]:
        """
        The layers that get an adapter.
        """
    @property
    def use_cayley_neumann(self, /) -> bool:
        """
        Whether OFT computes peft's series in place of the Cayley transform.
        """
    @property
    def use_dora(self, /) -> bool:
        """
        Whether adapters are weight-decomposed (DoRA).
        """
    @property
    def use_rslora(self, /) -> bool:
        """
        Whether the scale is lora_alpha / sqrt(r).
        """
    @property
    def wd_on_output(self, /) -> bool:
        """
        Whether DoRA has one magnitude for each output (otherwise for each input).
        """

@disjoint_base
class Model:
    """
    A model, with its tensors by name, its adapters and its checkpointing. Each kind of model is a subclass, whose
    objects can be called. `from_pretrained` loads one.

    ```python
    unet = tc.models.Model.from_pretrained("sdxl")  # the model of a pipeline that is fine-tuned
    unet.enable_gradient_checkpointing()
    adapter = unet.load_adapter("adapter.safetensors", scale=0.8)
    unet.merge_adapter()
    unet.save_pretrained("merged")
    ```
    """
    def __repr__(self, /) -> str: ...
    def add_adapter(self, /, config: LoraConfig) -> AdapterSet:
        """
        Put trainable adapters on the layers that `config` targets. The model's own weights do not change.

        Raises:
            ConfigError: if no layer matches, or the model has an adapter already.
        """
    def add_training_adapter(
        self,
        /,
        path: str | bytes | PathLike[str] | PathLike[bytes],
        scale: SupportsFloat | SupportsIndex = ...,
    ) -> TrainingAdapter:
        """
        Put the frozen LoRA of a file on the model, beside the adapter that is trained, and multiply its scale by
        `scale`. This is for training adapters of distilled models. Saved files and merged weights do not include it.

        Raises:
            MissingFileError, WeightsFormatError: if there is no such file, or it is not an adapter for this model.
            ConfigError: if the file is not a LoRA of linear layers, or a layer already has a training adapter.
        """
    def disable_gradient_checkpointing(self, /) -> None:
        """
        Keep everything between forward and backward.
        """
    @property
    def dtype(self, /) -> DType:
        """
        The dtype of the weights, in which the model computes.
        """
    def enable_gradient_checkpointing(self, /, policy: str = "full") -> None:
        """
        Keep only a part of the results between forward and backward, and recompute the others.

        Args:
            policy: "full" keeps the inputs of blocks; "selective" also keeps the results of matrix products and
                attention; "offload" keeps the inputs of blocks in the memory of the host.

        Raises:
            ArgumentError: if the policy is unknown.
        """
    @classmethod
    def from_config(
        cls,
        /,
        config: str | bytes | PathLike[str] | PathLike[bytes] | None = None,
        dtype: DType | str | None = None,
        device: str = "cpu",
        *,
        quantize: str | None = None,
        stream_blocks: SupportsIndex = 0,
        stream_modulation: bool = False,
    ) -> Self:
        """
        Make a frozen model of random weights, to measure its speed and memory.

        Args:
            config: the path of a `config.json`; default: the published model's configuration.
            dtype: the dtype of the weights; default: f32.
            device: the device of the weights.
            quantize: as in `from_pretrained`.
            stream_blocks: as in `from_pretrained`.
            stream_modulation: as in `from_pretrained`.

        Raises:
            ArgumentError: if called on the base class `Model`, or if the kind has no layers to quantize.
            MissingFileError, ConfigError: if the configuration is missing or belongs to another model.
            OutOfMemoryError: if the model does not fit.
        """
    @classmethod
    def from_pretrained(
        cls,
        /,
        path: str | bytes | PathLike[str] | PathLike[bytes],
        dtype: DType | str | None = None,
        device: str = "cpu",
        *,
        subfolder: str | None = None,
        config: str | bytes | PathLike[str] | PathLike[bytes] | None = None,
        force_upcast: bool | None = None,
        layers: SupportsIndex | None = None,
        quantize: str | None = None,
        stream_blocks: SupportsIndex = 0,
        stream_modulation: bool = False,
    ) -> Self:
        """
        Load the frozen model at `path`. The result has the class on which `from_pretrained` is called. If that is
        `Model`, the files determine the class.

        ```python
        unet = tc.models.load("sdxl", dtype="bf16")
        assert isinstance(unet, tc.models.SDXLUNet)
        ```

        Args:
            path: a model's folder, a weight file beside its `config.json`, a pipeline's folder, an original checkpoint
                in one file, or a name on the Hugging Face hub, "organisation/name". From a pipeline or an original
                checkpoint, `Model` loads the model that is fine-tuned.
            dtype: convert the weights; by default they stay as stored.
            device: the device of the weights.
            subfolder: the name of the model's folder in a pipeline ("unet", "vae", "text_encoder", "text_encoder_2"),
                which also selects the model of an original checkpoint. By default it is the first that fits the class.
            config: the path of a `config.json`, or of a pipeline's folder that has one, to use instead of the
                configuration beside the weights.
            force_upcast: whether the model is f32 even if half precision is requested or stored. By default its
                configuration decides. The configuration of SDXL's autoencoder requests f32, because its values exceed
                the range of f16.
            layers: load only this many layers of a language model, from the first on, to read their `hidden_states`;
                default: all.
            quantize: "int8", "fp8" or "nf4": quantize the weights of linear layers in blocks as `quantize` does, layer
                by layer while they are read. Other weights have `dtype`.
            stream_blocks: keep the weights of this many blocks in pinned host memory. Each block's weights are copied
                to the device before their use, on a separate stream, so that the device holds the weights of two such
                blocks at a time.
            stream_modulation: also keep the weights that compute the modulation of all blocks in pinned host memory.
                For Flux these are 6 GiB, which each step reads once.

        Raises:
            MissingFileError, WeightsFormatError: if files are missing or damaged.
            ConfigError: if the configuration belongs to another model, is not supported, or does not fit the weights.
            ArgumentError: if `layers` is given for another kind of model or exceeds the model's layers, if the kind has
                no layers to quantize, or if the model has fewer blocks than `stream_blocks`.
            OutOfMemoryError: if the model does not fit, or if the system cannot allocate the pinned memory.
        """
    def get_tensor(self, /, name: str) -> Tensor:
        """
        The tensor of this name among `named_tensors`. Only this tensor is dequantized.

        Raises:
            ArgumentError: if the model has no parameter of this name.
        """
    def load_adapter(
        self,
        /,
        path: str | bytes | PathLike[str] | PathLike[bytes],
        scale: SupportsFloat | SupportsIndex = ...,
    ) -> AdapterSet:
        """
        Put the adapters of a file on the model and multiply their scales by `scale`. The file may have any of the
        formats of `AdapterSet.save`, from any tool. Its adapters for other parts of a pipeline are ignored.

        Raises:
            MissingFileError, WeightsFormatError: if there is no such file, or it is not an adapter for this model.
            ConfigError: if the model has an adapter already.
        """
    def merge_adapter(self, /) -> None:
        """
        Make each adapted layer compute with one merged weight, as fast as the base. Changes of the adapters have no
        effect until `unmerge_adapter`.

        Raises:
            ArgumentError: if the model has no adapter.
        """
    def named_parameters(self, /) -> dict[str, Var]:
        """
        The trainable parameters of the model itself by name. A loaded model has none; in a fresh model all parameters
        are trainable.
        """
    def named_tensors(self, /) -> dict[str, Tensor]:
        """
        Every parameter by name. Parameters of adapters are not included, but a merged adapter is part of its layer's
        weight.
        """
    def remove_adapter(self, /) -> None:
        """
        Remove the adapters, merged or not; the model then computes exactly the base's results.
        """
    def save_pretrained(self, /, folder: str | bytes | PathLike[str] | PathLike[bytes]) -> None:
        """
        Write `config.json` and the weights to a folder that diffusers and transformers can load. Adapters are not
        written, but a merged adapter is part of its layer's weight.

        Raises:
            FileError: if a file cannot be written.
        """
    def unmerge_adapter(self, /) -> None:
        """
        Undo `merge_adapter`, exactly.

        Raises:
            ArgumentError: if the model has no adapter.
        """

@final
class NcclCommunicator:
    """
    This process's membership in a group of processes with one GPU each.

    Args:
        device: the GPU of this process.
        rank: the number of this process, from 0.
        size: the number of processes.
        unique_id: the bytes that rank 0 got from `nccl_unique_id`.
        seconds: how long to wait for the other processes.

    Raises:
        CudaUnavailableError: if NCCL cannot be used.
        ArgumentError: if a number is out of range.
        DeviceError: if NCCL fails, or not all processes have joined in time.
    """
    def __new__(
        cls,
        /,
        device: str,
        rank: SupportsIndex,
        size: SupportsIndex,
        unique_id: SupportsLenAndGetItem[SupportsIndex],
        seconds: SupportsFloat | SupportsIndex,
    ) -> NcclCommunicator: ...
    def all_reduce(self, /, tensor: Tensor) -> Tensor:
        """
        Return the sum of a tensor over all processes. The call only queues the work.

        Raises:
            DTypeError, DeviceError: if the tensor does not fit, or NCCL fails.
        """
    def all_reduce_gradients(
        self, /, parameters: Iterable[Var] | Mapping[str, Var], tail: Tensor, narrow: bool = False
    ) -> Tensor:
        """
        Sum the gradients of all processes in place, and sum one tensor of each process. The call only queues the work.

        Args:
            parameters: the variables, in the same order in all processes. A missing gradient counts as zeros.
            tail: the tensor of this process for the second sum, such as numbers about the step.
            narrow: send the gradients as bf16, which halves the bytes and rounds every sum.

        Returns:
            The sum of the tails.

        Raises:
            DeviceError: if a variable is on another device, or NCCL fails.
            OutOfMemoryError: if the vectors of gradients do not fit.
        """
    def broadcast_(self, /, var: Var, root: SupportsIndex) -> None:
        """
        Set a variable to its values on process `root`. The call only queues the work.

        Raises:
            ArgumentError: if there is no such process.
            DTypeError, DeviceError: if the variable does not fit, or NCCL fails.
        """
    @property
    def rank(self, /) -> int:
        """
        The number of this process.
        """
    @property
    def size(self, /) -> int:
        """
        The number of processes.
        """
    def stop(self, /) -> None:
        """
        End the current or the next `wait` with an error. Call it from another thread.
        """
    def wait(self, /, seconds: SupportsFloat | SupportsIndex) -> None:
        """
        Wait until all work queued on the GPU is done.

        Raises:
            DeviceError: if waiting takes longer than `seconds`, if `stop` was called, or if NCCL fails. The
                communicator cannot be used afterwards.
        """

@final
class NoiseSchedule:
    """
    The noise level of each timestep in a diffusion model's training. Names are those of diffusers, defaults those of
    SDXL.

    ```python
    schedule = tc.train.NoiseSchedule(prediction_type="v_prediction", rescale_betas_zero_snr=True)
    assert (schedule.num_train_timesteps, schedule.alphas_cumprod[-1]) == (1000, 0.0)
    ```

    Args:
        beta_schedule: how the variances of the added noise grow: "linear", "scaled_linear" or "squaredcos_cap_v2".
        beta_start: the variance of the first timestep, in (0, 1).
        beta_end: the variance of the last timestep, in (0, 1).
        num_train_timesteps: the number of timesteps, at least 2.
        prediction_type: what the model predicts: "epsilon" (the noise) or "v_prediction" (the velocity,
            sqrt(a) * noise - sqrt(1 - a) * data, where a is the timestep's entry of `alphas_cumprod`;
            arXiv:2202.00512).
        rescale_betas_zero_snr: whether the schedule is shifted so that the last timestep is pure noise
            (arXiv:2305.08891).
        timestep_spacing: how samplers pick timesteps: "leading", "trailing" or "linspace".
        steps_offset: added to the timesteps of the leading spacing.

    Raises:
        ArgumentError: if a name is unknown or a number out of range.
    """
    def __new__(
        cls,
        /,
        beta_schedule: str = "scaled_linear",
        beta_start: SupportsFloat | SupportsIndex = ...,
        beta_end: SupportsFloat | SupportsIndex = ...,
        num_train_timesteps: SupportsIndex = 1000,
        prediction_type: str = "epsilon",
        rescale_betas_zero_snr: bool = False,
        timestep_spacing: str = "leading",
        steps_offset: SupportsIndex = 1,
    ) -> NoiseSchedule: ...
    def __repr__(self, /) -> str: ...
    @property
    def alphas_cumprod(self, /) -> list[float]:
        """
        The fraction `a` of the variance of the noised data that comes from the data, for each timestep.
        """
    @staticmethod
    def from_pretrained(path: str | bytes | PathLike[str] | PathLike[bytes]) -> NoiseSchedule:
        """
        Read a diffusers configuration; missing fields have SDXL's values.

        Args:
            path: `scheduler_config.json`, its folder, or the folder of a model that has it in `scheduler`.

        Raises:
            MissingFileError: if there is no such file.
            ConfigError, ArgumentError: if an entry is wrong.
        """
    @property
    def num_train_timesteps(self, /) -> int:
        """
        The number of timesteps.
        """
    @property
    def prediction_type(self, /) -> str:
        """
        What the model predicts: "epsilon" or "v_prediction".
        """
    @property
    def rescale_betas_zero_snr(self, /) -> bool:
        """
        Whether the last timestep is pure noise.
        """
    @property
    def sigmas(self, /) -> list[float]:
        """
        The noise-to-data ratio of each timestep: sqrt((1 - a) / a), where a is the timestep's entry of
        `alphas_cumprod`.
        """
    @property
    def timestep_spacing(self, /) -> str:
        """
        How samplers pick timesteps.
        """

@final
class NoisedLatents:
    """
    A noised batch: the model's input and its target.

    ```python
    objective = tc.train.DiffusionObjective(tc.train.NoiseSchedule())
    noised = objective.noise(tc.randn(2, 4, 8, 8))
    assert noised.timesteps.shape == (2,) and noised.target.shape == (2, 4, 8, 8)
    ```

    Args:
        sample: the noised latents, (B, C, ...).
        timesteps: the timestep of each example, (B,), i64.
        target: the target of the prediction, in the shape of the latents, f32.
    """
    def __new__(cls, /, sample: Tensor, timesteps: Tensor, target: Tensor) -> NoisedLatents: ...
    @property
    def sample(self, /) -> Tensor:
        """
        The noised latents, in their shape and dtype.
        """
    @property
    def target(self, /) -> Tensor:
        """
        The target of the prediction, in the shape of the latents, f32.
        """
    @property
    def timesteps(self, /) -> Tensor:
        """
        The timestep of each example: (B,), i64.
        """

@disjoint_base
class Optimizer:
    """
    The base class of all optimizers. Construct one of its subclasses, such as `AdamW`.

    ```python
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.lr = 1e-4
    again = tc.optim.AdamW(model.parameters(), lr=1e-4)
    again.load_state_dict(optimizer.state_dict())
    ```
    """
    def __new__(
        cls,
        /,
        kind: str,
        params: Iterable[Var] | Mapping[str, Var] | Iterable[Mapping[str, Any]],
        settings: dict[str, Any],
        stochastic_rounding: bool = False,
        states: str = "device",
    ) -> Optimizer:
        """
        The optimizer of a kind, over `params`, with the hyper-parameters that differ from its defaults.
        """
    def __repr__(self, /) -> str: ...
    @property
    def averages(self, /) -> bool:
        """
        Whether the optimizer keeps averages of its variables, as AdamWScheduleFree does. `eval` replaces the variables'
        values by the averages.
        """
    def eval(self, /) -> None:
        """
        Replace the variables' values by the averages that the optimizer keeps, to validate with or to save. Does
        nothing if it keeps none.
        """
    @property
    def group_lrs(self, /) -> list[float]:
        """
        The learning rates of all groups. Assign a list with one number for each group.

        Raises:
            ArgumentError: on assignment, if there is not one number for each group, or if a number is negative or not
                finite.
        """
    @group_lrs.setter
    def group_lrs(self, /, lrs: SupportsGetItem[int, SupportsFloat | SupportsIndex]) -> None: ...
    def load_state_dict(self, /, state: dict[str, Tensor]) -> None:
        """
        Load the states of an optimizer of the same kind over variables of the same shapes.

        Raises:
            ConfigError: if an optimizer of another kind has saved the states, or if states are missing or not expected.
                In this case nothing changes.
            ShapeError, DTypeError: if a state has another shape or dtype. In this case nothing changes.
        """
    @property
    def lr(self, /) -> float:
        """
        The learning rate. Reading gives that of the first group; assigning sets it for all groups.

        Raises:
            ArgumentError: on assignment, if it is negative or not finite.
        """
    @lr.setter
    def lr(self, /, lr: SupportsFloat | SupportsIndex) -> None: ...
    @property
    def state_bytes(self, /) -> int:
        """
        Bytes of all existing states and master values. The first step of a variable creates its states; on a CUDA
        device, the first step of any variable creates the states of all.
        """
    def state_dict(self, /) -> dict[str, Tensor]:
        """
        A copy of all states, on the CPU: `INDEX.NAME` for a state of the variable with that index (counted through all
        groups), `INDEX.master` for its f32 master values, `step` (i64) with the number of steps of each variable, `lr`
        (f64) with the learning rate of each group, `kind` (u8) with the optimizer's name in ASCII, and, with stochastic
        rounding, `seed` (i64).
        """
    def step(self, /, *, if_finite: Tensor | None = None) -> None:
        """
        Update every variable that has a gradient. The gradients are kept until `zero_grad`.

        Args:
            if_finite: one number, such as the norm that `clip_grad_norm_` returned. If it is infinite or NaN, nothing
                changes and no step is counted. A CUDA device makes this decision without synchronization.

        Raises:
            ShapeError: if `if_finite` does not have exactly one element.
        """
    def train(self, /) -> None:
        """
        Restore the values that `eval` has replaced, bit for bit. Call it before the next step. Does nothing if `eval`
        has replaced none.
        """
    def zero_grad(self, /) -> None:
        """
        Clear the gradients of all variables.
        """

@final
class PartFacts:
    """
    One model of a checkpoint.

    ```python
    unet = tc.inspect("sdxl").parts["unet"]
    assert unet.class_name == "SDXLUNet"
    assert unet.weight_bytes("bf16") == 2 * unet.elements
    ```
    """
    @property
    def blocks(self, /) -> int:
        """
        The number of blocks that `stream_blocks` can keep in host memory.
        """
    @property
    def can_be_quantized(self, /) -> bool:
        """
        Whether `from_pretrained` can quantize the model. False also if layers are quantized in its file, because they
        keep their format.
        """
    def check_format(self, /, format: str, adapter: str, layers: SupportsGetItem[int, str]) -> None:
        """
        Check that a format of files can hold adapters of a kind on some of its layers.

        Args:
            format: "diffusers", "kohya", "comfyui" or "peft".
            adapter: the kind, such as "lora".
            layers: the names of the layers that get an adapter.

        Raises:
            ArgumentError: if the format cannot hold them. The message names a format that can.
            ConfigError: if there is no such kind.
        """
    @property
    def class_name(self, /) -> str:
        """
        The name of its class in `trainable_candle.models`.
        """
    @property
    def config(self, /) -> dict[str, Any]:
        """
        Its `config.json`.
        """
    @property
    def dtype(self, /) -> DType | None:
        """
        The dtype of most of its tensors.
        """
    @property
    def elements(self, /) -> int:
        """
        The number of elements of all its parameters.
        """
    def forward_flops(
        self, /, *, height: SupportsIndex = 0, width: SupportsIndex = 0, tokens: SupportsIndex = 0
    ) -> tuple[int, int]:
        """
        Floating-point operations of a forward pass over one sample, without adapters, as a pair: those of layers, and
        those of attention.

        Args:
            height: the height of the latents or the image that is the model's input.
            width: the width of the same.
            tokens: the number of tokens of the text.
        """
    @property
    def has_modulation(self, /) -> bool:
        """
        Whether `stream_modulation` can keep weights in host memory.
        """
    @property
    def layers(self, /) -> dict[str, list[int]]:
        """
        The layers that can have adapters, by name, with the shapes of their weights: (out, in) or (out, in, height, width).
        """
    @property
    def path(self, /) -> Path:
        """
        The folder or file that contains the model: the pipeline's, or the model's own.
        """
    def saved_values(
        self,
        /,
        config: LoraConfig,
        policy: str,
        *,
        height: SupportsIndex = 0,
        width: SupportsIndex = 0,
        tokens: SupportsIndex = 0,
    ) -> tuple[int, int]:
        """
        The approximate number of values that are kept between forward and backward at the peak, for one sample.

        Args:
            config: the layers that get adapters, and the ranks.
            policy: "none", "full", "selective" or "offload" checkpointing.
            height: the height of the latents or the image that is the model's input.
            width: the width of the same.
            tokens: the number of tokens of the text.

        Returns:
            The values on the device, and those in the memory of the host ("offload" alone).

        Raises:
            ConfigError: if a pattern is not a regular expression.
        """
    def streamed_bytes(
        self,
        /,
        dtype: DType | str,
        quantize: str | None = None,
        *,
        stream_blocks: SupportsIndex = 0,
        stream_modulation: bool = False,
    ) -> tuple[int, int]:
        """
        Bytes of the weights in host memory, as a pair: those of blocks, and those of the blocks' modulation. The
        arguments are those of `weight_bytes`.
        """
    @property
    def tensors(self, /) -> dict[str, list[int]]:
        """
        The shapes of its parameters by name, as in files.
        """
    def weight_bytes(
        self,
        /,
        dtype: DType | str,
        quantize: str | None = None,
        *,
        stream_blocks: SupportsIndex = 0,
        stream_modulation: bool = False,
    ) -> int:
        """
        Bytes of its weights.

        Args:
            dtype: the dtype of the weights.
            quantize: the format of linear layers in blocks, as in `from_pretrained`.
            stream_blocks: as in `from_pretrained`; weights in host memory are not counted.
            stream_modulation: as in `from_pretrained`; weights in host memory are not counted.

        Raises:
            ArgumentError: if the format is unknown, if the model has no layers that may be quantized, or if it has
                fewer blocks than `stream_blocks`.
        """

@final
class QuantizedTensor:
    """
    A frozen matrix in four to eight bits per value, stored as codes and scales. `quantize` makes one, and
    `nn.functional.linear` takes it as a weight.

    ```python
    weight = tc.quantize(tc.randn(64, 128), "int8")
    y = tc.nn.functional.linear(tc.randn(3, 128), weight)
    assert (y.shape, weight.nbytes) == ((3, 64), 64 * 128 + 64 * 4)
    ```
    """
    def __repr__(self, /) -> str: ...
    def dequantize(self, /, dtype: DType | str | None = None) -> Tensor:
        """
        The values: code times scale in f32, rounded once.

        Args:
            dtype: the dtype of the result; default: the dtype of the matrix.

        Raises:
            DTypeError: if the dtype is not floating point.
        """
    @property
    def device(self, /) -> str:
        """
        The device: "cpu" or "cuda:0".
        """
    @property
    def dtype(self, /) -> DType:
        """
        The dtype of the values that the matrix represents.
        """
    @property
    def format(self, /) -> str:
        """
        "int8", "fp8", "nf4", or a block format of ggml, such as "q8_0" or "q4_k".
        """
    @staticmethod
    def from_blocks(
        blocks: Tensor, format: str, dtype: DType | str | None = None
    ) -> QuantizedTensor:
        """
        Make a matrix from blocks of ggml, as stored in GGUF files.

        Args:
            blocks: u8, (rows, bytes of a row).
            format: "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k" or "q6_k".
            dtype: the dtype of the values that the matrix represents.

        Raises:
            ArgumentError: if the format is unknown.
            ShapeError: if a row does not divide into blocks.
            DTypeError: if `blocks` is not u8, or `dtype` not floating point.
        """
    @property
    def nbytes(self, /) -> int:
        """
        Bytes of codes and scales.
        """
    def numel(self, /) -> int:
        """
        The number of elements.
        """
    @property
    def shape(self, /) -> tuple[int, ...]:
        """
        Rows and columns.
        """
    def tensors(self, /) -> dict[str, Tensor]:
        """
        The tensors of the matrix: "codes" (u8) and "scales"; for "nf4" also "scale_codes" (u8) and "offset". Blocks of
        ggml only have "codes", which contain the scales.
        """
    def to(self, /, device: str) -> QuantizedTensor:
        """
        The same matrix on another device.

        Raises:
            DeviceError: if the device is unknown.
        """

@final
class QwenImageTransformer(Model):
    """
    The transformer of Qwen-Image, with the results and the parameter names of diffusers' `QwenImageTransformer2DModel`.
    `from_pretrained` loads one.
    """
    def __call__(
        self,
        /,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor | float | int,
        img_ids: Tensor,
        txt_ids: Tensor,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """
        The velocity (noise minus latents) that the model predicts for noisy latents.

        Args:
            hidden_states: noisy latents as tokens, (B, S, in_channels): each token is a square of 2 x 2 latents,
                channels first.
            encoder_hidden_states: the text's features from Qwen2.5-VL, (B, L, joint_attention_dim).
            timestep: the time from 0 (clean) to 1 (noise): (B,), (1,), or a number.
            img_ids: positions of the image's tokens, (S, 3): 0, row, column. Of n rows, the first is at n // 2 - n and the
                last at n // 2 - 1; columns likewise.
            txt_ids: positions of the text's tokens, (L, 3): token i of the text of an image of h rows and w columns is at
                max(h // 2, w // 2) + i on all axes.
            lengths: the number of tokens of each text that attention reads, (B,), f32, at least 1. By default attention
                reads all tokens and needs no mask, which saves time.

        Returns:
            A tensor of the shape of `hidden_states`, in the dtype of the weights.

        Raises:
            ShapeError: if the inputs do not fit the model or one another.
        """

@final
class SD3Transformer(Model):
    """
    The transformer of SD3 and SD3.5, with the results and the parameter names of diffusers' `SD3Transformer2DModel`.
    `from_pretrained` loads one.
    """
    def __call__(
        self,
        /,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        pooled_projections: Tensor,
        timestep: Tensor | float | int,
    ) -> Tensor:
        """
        The velocity (noise minus latents) that the model predicts for noisy latents.

        Args:
            hidden_states: noisy latents, (B, 16, h, w), shifted and scaled by the autoencoder's factors; h and w are
                even.
            encoder_hidden_states: the text's tokens, (B, L, joint_attention_dim).
            pooled_projections: the pooled text, (B, pooled_projection_dim).
            timestep: the time from 0 (clean) to 1000 (noise): (B,), (1,), or a number.

        Returns:
            A tensor of the shape of `hidden_states`, in the dtype of the weights.

        Raises:
            ShapeError: if the inputs do not fit the model or one another.
        """

@final
class SDXLUNet(Model):
    """
    SDXL's UNet, with the results and the parameter names of diffusers' `UNet2DConditionModel`. `from_pretrained` loads
    one.

    ```python
    unet = tc.models.SDXLUNet.from_pretrained("sdxl", "f32")
    text, pooled = tc.randn(1, 77, 128), tc.randn(1, 64)
    sizes = tc.tensor([[128, 128, 0, 0, 128, 128]])
    noise = unet(tc.randn(1, 4, 16, 16), 500, text, text_embeds=pooled, time_ids=sizes)
    assert noise.shape == (1, 4, 16, 16)
    ```
    """
    def __call__(
        self,
        /,
        sample: Tensor,
        timestep: Tensor | float | int,
        encoder_hidden_states: Tensor,
        *,
        text_embeds: Tensor,
        time_ids: Tensor,
    ) -> Tensor:
        """
        The prediction for noisy latents: the noise, or the velocity if the model was trained for it.

        Args:
            sample: noisy latents, (B, 4, h, w), scaled by the autoencoder's factor.
            timestep: the time from 0 (clean) to 999 (noise): (B,), (1,), or a number.
            encoder_hidden_states: the text's tokens, (B, L, cross_attention_dim).
            text_embeds: the pooled text, (B, P).
            time_ids: original height and width, top and left of the crop, target height and width, (B, 6).

        Returns:
            A tensor of the shape of `sample`, in the dtype of the weights.

        Raises:
            ShapeError: if the inputs do not fit the model or one another.
        """

@final
class Sampler:
    """
    One run of a diffusion model from noise to data.

    ```python
    sampler = tc.train.Sampler(tc.train.NoiseSchedule(), 10, "dpmpp_2m")
    x = sampler.init_noise(tc.randn(1, 4, 8, 8))
    for i, timestep in enumerate(sampler.timesteps):
        output = tc.zeros(1, 4, 8, 8)  # of a model, for sampler.scale_input(x, i) at the timestep
        x = sampler.step(output, i, x)
    ```

    Args:
        schedule: the noise schedule of the model's training.
        steps: the number of calls of the model, at least 1.
        kind: "euler" (diffusers' EulerDiscreteScheduler) or "dpmpp_2m" (DPM-Solver++ of second order, arXiv:2211.01095;
            diffusers' DPMSolverMultistepScheduler).
        karras_sigmas: whether noise levels are spaced as in arXiv:2206.00364, equation 5.

    Raises:
        ArgumentError: if the kind is unknown, or if there are no steps or too many: "euler" takes at most as many steps as
            the schedule has timesteps, "dpmpp_2m" one fewer.
    """
    def __new__(
        cls,
        /,
        schedule: NoiseSchedule,
        steps: SupportsIndex,
        kind: str = "euler",
        karras_sigmas: bool = False,
    ) -> Sampler: ...
    def init_noise(self, /, noise: Tensor) -> Tensor:
        """
        Scale noise to the first sample of the run, f32.

        Args:
            noise: standard normal values.
        """
    def scale_input(self, /, x: Tensor, i: SupportsIndex) -> Tensor:
        """
        Scale the sample to the model's input.

        Args:
            x: the sample at step `i`.
            i: the step, from 0.

        Raises:
            ArgumentError: if there is no such step.
        """
    @property
    def sigmas(self, /) -> list[float]:
        """
        The noise-to-data ratio at each step, and 0 after the last.
        """
    def step(self, /, model_output: Tensor, i: SupportsIndex, x: Tensor) -> Tensor:
        """
        Compute the sample at the next noise level. Steps are taken in order; step 0 starts the run again.

        Args:
            model_output: the model's output for the scaled sample.
            i: the step, from 0.
            x: the sample at step `i`.

        Returns:
            The sample at step `i + 1`, f32.

        Raises:
            ArgumentError: if there is no step `i`, or for "dpmpp_2m" if step `i` is neither the next one nor 0.
            ShapeError: if the model's output does not have the sample's shape.
        """
    @property
    def timesteps(self, /) -> list[float]:
        """
        The timestep that the model receives at each step.
        """

@final
class Schedule:
    """
    The factor on the learning rate as a function of the step, as in transformers' schedules with warm-up. Over the
    first `warmup_steps` steps the factor rises linearly from 0; afterwards `kind` determines it.

    Args:
        kind: "constant", "linear", "cosine" or "polynomial".
        warmup_steps: steps of the warm-up.
        total_steps: steps of the training, warm-up included.
        num_cycles: the number of cycles of the cosine; with half a cycle the factor falls from 1 to 0.
        end: the last factor of the polynomial, in [0, 1).
        power: the power of the polynomial, above 0.

    Raises:
        ArgumentError: if the kind is unknown or a number out of range.
    """
    def __new__(
        cls,
        /,
        kind: str,
        warmup_steps: SupportsIndex = 0,
        total_steps: SupportsIndex = 0,
        *,
        num_cycles: SupportsFloat | SupportsIndex = ...,
        end: SupportsFloat | SupportsIndex = ...,
        power: SupportsFloat | SupportsIndex = ...,
    ) -> Schedule: ...
    def factor(self, /, step: SupportsIndex) -> float:
        """
        The factor of step `step`, which counts from 0.
        """

@final
class T5Encoder(Model):
    """
    The text encoder of Stable Diffusion 3 and Flux, with the results of transformers' `T5EncoderModel`. It also
    computes in f16 without overflow: it scales values that would exceed the range of f16. `from_pretrained` loads one.
    """
    def __call__(self, /, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """
        The last block's states after the final norm, one for each token: (B, L, D), in the dtype of the weights.

        Args:
            input_ids: token ids, (B, L), i64 or u32.
            attention_mask: (B, L), i64 or u32: 1 for tokens that attention reads, 0 for others. By default it reads all
                tokens, padding included, as in diffusers' pipelines.

        Raises:
            ShapeError: if an input has another shape.
            IndexOutOfRangeError: if an id is not a token, or the mask has other values than 0 and 1.
            DTypeError: if an input is not of integers.
        """

@disjoint_base
class Tensor(ComposedMethods):
    """
    An immutable array of numbers on a device, and its place on the autograd tape.

    Make one with `tensor`, `zeros`, `randn` and similar functions. The tape records operations on tensors that depend
    on a `Var`; `backward` follows it. Shapes broadcast as in numpy. Elementwise arithmetic and comparisons of two
    tensors promote dtypes as torch does; other operations need tensors of one dtype. A Python number gets the tensor's
    dtype, except that a float with a tensor of integers gives f32.

    ```python
    t = tc.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert (t @ t.T).sum(1).tolist() == [16.0, 36.0]
    assert (t.shape, t.dtype, t.device) == ((2, 2), "f32", "cpu")
    ```
    """

    __array_priority__: Final = 1000.0
    """
    This priority makes numpy call the operator of the tensor in an expression such as `array + tensor`.
    """
    @property
    def T(self, /) -> Tensor:
        """
        The dimensions in reverse order: the transpose of a matrix.
        """
    def __abs__(self, /) -> Tensor: ...
    def __add__(self, other: object, /) -> Tensor: ...
    def __array__(self, /, dtype: Any | None = None, copy: bool | None = None) -> NDArray[Any]: ...
    def __bool__(self, /) -> bool: ...
    def __dlpack__(
        self,
        /,
        *,
        stream: SupportsIndex | None = None,
        max_version: tuple[SupportsIndex, SupportsIndex] | None = None,
        dl_device: tuple[SupportsIndex, SupportsIndex] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """
        A capsule for other libraries' `from_dlpack`. It shares memory with consumers that support read-only tensors
        (DLPack 1.0), and holds a copy for others unless `copy=False`. On a CUDA device, the consumer's `stream` waits
        for the values; by default this is the default stream, and with -1 no stream waits. The memory is reused only
        after the consumer has released it.
        """
    def __dlpack_device__(self, /) -> tuple[int, int]:
        """
        DLPack's device type and number.
        """
    def __eq__(self, other: object, /) -> Tensor: ...
    def __float__(self, /) -> builtins.float: ...
    def __format__(self, /, spec: str) -> str:
        """
        A tensor with one element is formatted like a Python number, as in torch.
        """
    def __ge__(self, other: object, /) -> Tensor: ...
    def __getitem__(self, index: Any, /) -> Tensor:
        """
        Index with integers, slices with any step, None and ... as in numpy. An index may contain one integer tensor
        (positions along a dimension) or one u8 mask, as in torch. The result is a view unless the index contains a
        tensor or a step other than 1. Indexing is differentiable.
        """
    def __gt__(self, other: object, /) -> Tensor: ...
    def __hash__(self, /) -> int:
        """
        Hash by identity, not by value.
        """
    def __index__(self, /) -> Any: ...
    def __int__(self, /) -> Any: ...
    def __iter__(self, /) -> Iterator[Tensor]: ...
    def __le__(self, other: object, /) -> Tensor: ...
    def __len__(self, /) -> int: ...
    def __lt__(self, other: object, /) -> Tensor: ...
    def __matmul__(self, other: object, /) -> Tensor: ...
    def __mul__(self, other: object, /) -> Tensor: ...
    def __ne__(self, other: object, /) -> Tensor: ...
    def __neg__(self, /) -> Tensor: ...
    def __pos__(self, /) -> Tensor: ...
    def __pow__(self, exponent: object, modulo: object = None, /) -> Tensor: ...
    def __radd__(self, other: object, /) -> Tensor: ...
    def __reduce__(self, /) -> tuple[Any, tuple[NDArray[Any], str, str]]:
        """
        Pickles and copies contain the values. A variable becomes a variable without a gradient; any other tensor
        becomes a constant.
        """
    def __repr__(self, /) -> str: ...
    def __rmatmul__(self, other: object, /) -> Tensor: ...
    def __rmul__(self, other: object, /) -> Tensor: ...
    def __rpow__(self, base: object, modulo: object = None, /) -> Tensor: ...
    def __rsub__(self, other: object, /) -> Tensor: ...
    def __rtruediv__(self, other: object, /) -> Tensor: ...
    def __sub__(self, other: object, /) -> Tensor: ...
    def __truediv__(self, other: object, /) -> Tensor: ...
    def abs(self, /) -> Tensor:
        """
        The absolute value; the gradient at 0 is 0.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def argmax(self, /, dim: SupportsIndex | None = None, keepdim: bool = False) -> Tensor:
        """
        The position of the largest element, as i64; of equal elements, that of the first. It has no gradient.

        Args:
            dim: a dimension; by default, the position in the flattened tensor.
            keepdim: whether the result keeps the dimension with size 1.

        Raises:
            IndexOutOfRangeError: if the dimension is out of range.
        """
    def backward(self, /, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        """
        Differentiate with respect to every variable that this tensor depends on, and add the gradients to the
        variables' `.grad`.

        The backward pass frees each saved tensor after its last use, unless `retain_graph` is True.

        Args:
            gradient: the gradient of this tensor, in its shape; not needed for a single element.
            retain_graph: whether the graph can be differentiated again.

        Raises:
            ShapeError: if there is more than one element and no gradient, or the gradient has another shape.
            AutogradError: if this tensor depends on no variable, if the graph was differentiated before, or if a
                variable was changed in place since it was used.
        """
    def broadcast_to(self, /, *shape: int | tuple[int, ...] | list[int]) -> Tensor:
        """
        A view of shape `shape`, in which dimensions of size 1 and new leading dimensions repeat.

        Raises:
            ShapeError: if repeating elements does not give the shape.
        """
    def chunk(self, /, chunks: SupportsIndex, dim: SupportsIndex = 0) -> list[Tensor]:
        """
        Views of `chunks` parts along `dim`; the last part may be smaller.

        Raises:
            ArgumentError: if `chunks` is 0.
            IndexOutOfRangeError: if the dimension is out of range.
        """
    def clamp(
        self,
        /,
        min: SupportsFloat | SupportsIndex | None = ...,
        max: SupportsFloat | SupportsIndex | None = ...,
    ) -> Tensor:
        """
        Limit each element to [min, max]. The gradient of elements outside of this range is 0.

        Raises:
            ArgumentError: if neither limit is given, or min > max.
            DTypeError: if the tensor is not floating point.
        """
    def contiguous(self, /) -> Tensor:
        """
        The values in row-major order; copies only if necessary.
        """
    def cos(self, /) -> Tensor:
        """
        The cosine.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def cumsum(self, /, dim: SupportsIndex) -> Tensor:
        """
        The cumulative sum along `dim`: element i of the result is the sum of elements 0 to i.

        Raises:
            IndexOutOfRangeError: if the dimension is out of range.
            DTypeError: if the tensor is not floating point.
        """
    def detach(self, /) -> Tensor:
        """
        A tensor with the same values (shared storage), detached from the tape.
        """
    @property
    def device(self, /) -> Device:
        """
        The device: "cpu" or "cuda:0".
        """
    @property
    def dtype(self, /) -> DType:
        """
        The dtype; compares equal to its names, such as "f32" and "float32".
        """
    def embedding(self, /, ids: Tensor) -> Tensor:
        """
        Look up the rows of this table (entries, width) at positions `ids` of any shape; the result is (..., width).

        Raises:
            IndexOutOfRangeError: if a position is out of range.
            ShapeError: if the table is not a matrix.
            DTypeError: if `ids` is not an integer tensor.
        """
    def exp(self, /) -> Tensor:
        """
        e to the power of each element.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def expand(self, /, *shape: int | tuple[int, ...] | list[int]) -> Tensor:
        """
        As `broadcast_to`, but -1 keeps a dimension's size, as in torch.

        Raises:
            ShapeError: if repeating elements does not give the shape.
        """
    def flatten(self, /, start_dim: SupportsIndex = 0, end_dim: SupportsIndex = -1) -> Tensor:
        """
        Merge dimensions `start_dim` to `end_dim` into one.

        Raises:
            ArgumentError: if `start_dim` comes after `end_dim`.
            IndexOutOfRangeError: if a dimension is out of range.
        """
    def float(self, /) -> Tensor:
        """
        The values in f32.
        """
    def gather(self, /, dim: SupportsIndex, index: Tensor) -> Tensor:
        """
        Select one element along `dim` for each position in `index`. The result has the shape of `index`.

        Args:
            dim: the dimension.
            index: i64 or u32 positions, with as many dimensions as this tensor.

        Raises:
            IndexOutOfRangeError: if a position or the dimension is out of range.
            ShapeError: if the shapes do not fit.
            DTypeError: if `index` is not an integer tensor.
        """
    def gelu(self, /, approximate: str = "none") -> Tensor:
        """
        GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415).

        Args:
            approximate: "none" for x * Phi(x), computed with the error function; "tanh" for its approximation with
                tanh.

        Raises:
            ArgumentError: if `approximate` is something else.
            DTypeError: if the tensor is not floating point.
        """
    def index_select(self, /, dim: SupportsIndex, index: Tensor) -> Tensor:
        """
        Select the slices at positions `index` along `dim`.

        Args:
            dim: the dimension.
            index: (n,) i64 or u32 positions.

        Raises:
            IndexOutOfRangeError: if a position or the dimension is out of range.
            DTypeError: if `index` is not an integer tensor.
        """
    def is_contiguous(self, /) -> bool:
        """
        Whether the elements are in row-major order without gaps.
        """
    @property
    def is_leaf(self, /) -> bool:
        """
        Whether this is a variable or a constant, not the result of a recorded operation.
        """
    def item(self, /) -> Any:
        """
        The only element as a Python number.

        Raises:
            ShapeError: if there is not exactly one element.
        """
    def log(self, /) -> Tensor:
        """
        The natural logarithm.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def log_softmax(self, /, dim: SupportsIndex = -1) -> Tensor:
        """
        The logarithm of `softmax`, computed without overflow or underflow.

        Raises:
            IndexOutOfRangeError: if the dimension is out of range.
            DTypeError: if the tensor is not floating point.
        """
    def logsumexp(
        self,
        /,
        dim: SupportsIndex | Sequence[SupportsIndex] | None = None,
        keepdim: bool = False,
        *,
        axis: SupportsIndex | Sequence[SupportsIndex] | None = None,
    ) -> Tensor:
        """
        The logarithm of the sum of exponentials, without overflow.

        Args:
            dim: a dimension or several; default all.
            keepdim: whether the result keeps reduced dimensions with size 1.
            axis: another name of `dim`.

        Raises:
            IndexOutOfRangeError: if a dimension is out of range.
           DTypeError: if the tensor is not floating point.
        """
    def make_var(self, /) -> Var:
        """
        Make a variable with a contiguous copy of the values, detached from the graph.

        Raises:
            DTypeError: if the values are not floating point.
        """
    def matmul(self, /, other: Tensor | builtins.float | int) -> Tensor:
        """
        The matrix product (..., m, k) x (..., k, n) -> (..., m, n).

        Batch dimensions broadcast. As in numpy, a vector on the left counts as a row and a vector on the right as a
        column, and the result does not have that dimension.

        Raises:
            ShapeError: if the shapes do not fit.
            DTypeError: if the dtypes differ or are not floating point.
        """
    def max(
        self,
        /,
        dim: SupportsIndex | Sequence[SupportsIndex] | None = None,
        keepdim: bool = False,
        *,
        axis: SupportsIndex | Sequence[SupportsIndex] | None = None,
    ) -> Tensor:
        """
        The largest element. Over one dimension, the first of equal elements gets the gradient; over several or all
        dimensions, equal elements share it.

        Args:
            dim: a dimension or several; default all.
            keepdim: whether the result keeps reduced dimensions with size 1.
            axis: another name of `dim`.

        Raises:
            IndexOutOfRangeError: if a dimension is out of range.
            ShapeError: if there are no elements.
            DTypeError: if the tensor is not floating point.
        """
    def maximum(self, /, other: Tensor | builtins.float | int) -> Tensor:
        """
        The larger of each pair of elements. Equal elements share the gradient.

        Raises:
            ShapeError: if the shapes do not broadcast.
        """
    def mean(
        self,
        /,
        dim: SupportsIndex | Sequence[SupportsIndex] | None = None,
        keepdim: bool = False,
        *,
        axis: SupportsIndex | Sequence[SupportsIndex] | None = None,
    ) -> Tensor:
        """
        The mean.

        Args:
            dim: a dimension or several; default all.
            keepdim: whether the result keeps reduced dimensions with size 1.
            axis: another name of `dim`.

        Raises:
            IndexOutOfRangeError: if a dimension is out of range.
           DTypeError: if the tensor is not floating point.
        """
    def min(
        self,
        /,
        dim: SupportsIndex | Sequence[SupportsIndex] | None = None,
        keepdim: bool = False,
        *,
        axis: SupportsIndex | Sequence[SupportsIndex] | None = None,
    ) -> Tensor:
        """
        The smallest element, with gradients as in `max`.

        Args:
            dim: a dimension or several; default all.
            keepdim: whether the result keeps reduced dimensions with size 1.
            axis: another name of `dim`.

        Raises:
            IndexOutOfRangeError: if a dimension is out of range.
            ShapeError: if there are no elements.
            DTypeError: if the tensor is not floating point.
        """
    def minimum(self, /, other: Tensor | builtins.float | int) -> Tensor:
        """
        The smaller of each pair of elements. Equal elements share the gradient.

        Raises:
            ShapeError: if the shapes do not broadcast.
        """
    def narrow(self, /, dim: SupportsIndex, start: SupportsIndex, length: SupportsIndex) -> Tensor:
        """
        A view of `length` elements from `start` along `dim`.

        Raises:
            IndexOutOfRangeError: if the range is not inside the dimension.
        """
    @property
    def nbytes(self, /) -> int:
        """
        Bytes of all elements.
        """
    @property
    def ndim(self, /) -> int:
        """
        The number of dimensions.
        """
    def neg(self, /) -> Tensor:
        """
        The negative.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def numel(self, /) -> int:
        """
        The number of elements.
        """
    def numpy(self, /) -> NDArray[Any]:
        """
        A numpy array with a copy of the values. It is not part of the graph.

        For a view without a copy (read-only), use `numpy.from_dlpack(t)`.

        Raises:
            DTypeError: for bf16, which numpy does not have; convert with `.to("f32")` first.
        """
    def permute(self, /, *dims: int | tuple[int, ...] | list[int]) -> Tensor:
        """
        Reorder the dimensions. The order is given as arguments or one sequence.

        Raises:
            ShapeError: if the order is not a permutation of the dimensions.
        """
    def pow(self, /, exponent: Tensor | builtins.float | int) -> Tensor:
        """
        Each element to the power of `exponent`.

        Raises:
            ShapeError: if the shapes do not broadcast.
            DTypeError: if neither this tensor nor the exponent is floating point, or if the exponent is a numpy array
                of another dtype.
        """
    def reciprocal(self, /) -> Tensor:
        """
        One over each element.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def relu(self, /) -> Tensor:
        """
        max(x, 0); NaN stays NaN.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    @property
    def requires_grad(self, /) -> bool:
        """
        Whether the tensor is a variable or depends on one. Backward passes then compute its gradient.
        """
    def reshape(self, /, *shape: int | tuple[int, ...] | list[int]) -> Tensor:
        """
        The same elements, in row-major order, in another shape. The result is a view if the layout allows it.

        Args:
            shape: the sizes, as arguments or one sequence; one may be -1, which is computed from the others.

        Raises:
            ShapeError: if the number of elements differs.
        """
    @property
    def shape(self, /) -> tuple[int, ...]:
        """
        The sizes of the dimensions.
        """
    def sigmoid(self, /) -> Tensor:
        """
        1 / (1 + exp(-x)).

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def silu(self, /) -> Tensor:
        """
        x * sigmoid(x).

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def sin(self, /) -> Tensor:
        """
        The sine.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def softmax(self, /, dim: SupportsIndex = -1) -> Tensor:
        """
        exp(x) divided by the sum of exponentials along `dim`, computed without overflow.

        Raises:
            IndexOutOfRangeError: if the dimension is out of range.
            DTypeError: if the tensor is not floating point.
        """
    def split(
        self,
        /,
        split_size_or_sections: SupportsIndex | Sequence[SupportsIndex],
        dim: SupportsIndex = 0,
    ) -> list[Tensor]:
        """
        Views of parts along `dim`.

        Args:
            split_size_or_sections: one size for all parts, of which the last may be smaller, or a list with the size of
                each part.
            dim: the dimension.

        Raises:
            ShapeError: if the sizes do not add up to the size of the dimension.
            ArgumentError: if a size for all parts is given and is 0.
            IndexOutOfRangeError: if the dimension is out of range.
        """
    def sqrt(self, /) -> Tensor:
        """
        The square root.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def square(self, /) -> Tensor:
        """
        The square.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def squeeze(self, /, dim: SupportsIndex | Sequence[SupportsIndex] | None = None) -> Tensor:
        """
        Remove dimensions of size 1: all of them, or those among `dim`.

        Raises:
            IndexOutOfRangeError: if a dimension is out of range.
        """
    def sum(
        self,
        /,
        dim: SupportsIndex | Sequence[SupportsIndex] | None = None,
        keepdim: bool = False,
        *,
        axis: SupportsIndex | Sequence[SupportsIndex] | None = None,
    ) -> Tensor:
        """
        The sum. Integers and masks sum to i64.

        Args:
            dim: a dimension or several; default all.
            keepdim: whether the result keeps reduced dimensions with size 1.
            axis: another name of `dim`.

        Raises:
            IndexOutOfRangeError: if a dimension is out of range.
        """
    def tanh(self, /) -> Tensor:
        """
        The hyperbolic tangent.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def to(
        self,
        /,
        target: DType | str | None = None,
        *,
        dtype: DType | str | None = None,
        device: str | None = None,
    ) -> Tensor:
        """
        The same values in another dtype or on another device.

        A cast between floating point dtypes is differentiable. The gradient has this tensor's dtype.

        Args:
            target: a dtype ("bf16", "float32", tc.float16) or a device ("cpu", "cuda", "cuda:1").
            dtype: the dtype, by keyword.
            device: the device, by keyword.

        Raises:
            DTypeError: if the dtype is unknown.
            DeviceError: if the device is unknown.
            CudaUnavailableError: if the device is a CUDA device and CUDA cannot be used. The message says why.
        """
    def tolist(self, /) -> Any:
        """
        The elements as nested lists of Python numbers; a number if there are no dimensions.
        """
    def transpose(self, /, dim0: SupportsIndex, dim1: SupportsIndex) -> Tensor:
        """
        Swap two dimensions.

        Raises:
            IndexOutOfRangeError: if a dimension is out of range.
        """
    def unsqueeze(self, /, dim: SupportsIndex) -> Tensor:
        """
        Insert a dimension of size 1 at position `dim`.

        Raises:
            IndexOutOfRangeError: if the position is out of range.
        """
    def var(
        self,
        /,
        dim: SupportsIndex | Sequence[SupportsIndex] | None = None,
        keepdim: bool = False,
        *,
        correction: SupportsFloat | SupportsIndex = ...,
        unbiased: bool | None = None,
        axis: SupportsIndex | Sequence[SupportsIndex] | None = None,
    ) -> Tensor:
        """
        The variance: squared deviations from the mean, summed and divided by `n - correction`.

        Args:
            dim: a dimension or several; default all.
            keepdim: whether the result keeps reduced dimensions with size 1.
            correction: 1 for the unbiased estimate (torch's default), 0 for numpy's default.
            unbiased: True for a correction of 1, False for 0.
            axis: another name of `dim`.

        Raises:
            IndexOutOfRangeError: if a dimension is out of range.
            DTypeError: if the tensor is not floating point.
        """
    def view(self, /, *shape: int | tuple[int, ...] | list[int]) -> Tensor:
        """
        The same as `reshape`; torch has both names.
        """

@final
class TextFeatures:
    """
    The features that a text encoder computes for texts.

    ```python
    encoder = tc.models.CLIPTextModel.from_pretrained("sdxl", subfolder="text_encoder")
    features = encoder(tc.tensor([[1, 2, 3]]))
    assert features.last_hidden_state.shape[:2] == features.skipped(1).shape[:2]
    ```
    """
    @property
    def hidden_states(self, /) -> list[Tensor]:
        """
        The states after the embedding and after each layer, before the final norm.
        """
    @property
    def last_hidden_state(self, /) -> Tensor:
        """
        The last layer's states after the final norm, (B, S, D).
        """
    @property
    def penultimate(self, /) -> Tensor:
        """
        The input of the last layer, (B, S, D), which SDXL reads.
        """
    @property
    def pooled(self, /) -> Tensor:
        """
        The state at the token that ends each text, after the final norm: (B, D), or (B, P) if the model projects it.
        """
    def skipped(self, /, clip_skip: SupportsIndex) -> Tensor:
        """
        The states `clip_skip` layers before `penultimate`, as diffusers' SDXL pipelines count.

        Raises:
            ArgumentError: if the model has fewer layers.
        """

@final
class TrainingAdapter:
    """
    A frozen LoRA that `add_training_adapter` puts on a model, beside the adapter that is trained.

    ```python
    unet = tc.models.load("sdxl")
    frozen = unet.add_training_adapter("adapter.safetensors")
    adapter = unet.add_adapter(tc.LoraConfig(r=4))  # trained beside it
    frozen.set_enabled(False)
    ```
    """
    def __len__(self, /) -> int:
        """
        The number of layers that have the adapter.
        """
    def numel(self, /) -> int:
        """
        The number of elements of all its factors.
        """
    def remove(self, /) -> None:
        """
        Remove the adapter from the model.
        """
    def set_enabled(self, /, enabled: bool) -> None:
        """
        Set whether the model computes with the adapter. While the adapter is disabled, the model computes exactly what
        it would compute without the adapter.
        """

@final
class Var(VarMethods, Tensor):
    """
    A trainable variable: a tensor with its own storage, whose values can be set and which accumulates a gradient.

    A `Var` is a `Tensor`. After a change of its values, tensors that were computed from it before are stale: a backward
    pass through them raises an error instead of computing a wrong gradient.

    ```python
    v = tc.Var([1.0, 2.0, 3.0])
    (v * v).sum().backward()
    assert v.grad.tolist() == [2.0, 4.0, 6.0]
    v.set(v.detach() - 0.1 * v.grad)
    ```

    Args:
        data: a tensor, whose values are copied and detached from the graph, or anything that `tensor` takes.
        dtype: a floating point dtype; default: the data's.
        device: the device; default: the data's.

    Raises:
        DTypeError: if the values are not floating point.
    """
    def __new__(
        cls, /, data: Any, dtype: DType | str | None = None, device: str | None = None
    ) -> Var: ...
    def _replace(self, /) -> None:
        """
        Note that a copy has taken the place of this variable; a step of an optimizer that still has it raises.
        """
    @property
    def grad(self, /) -> Tensor | None:
        """
        The accumulated gradient, or None. Assigning a tensor replaces the gradient; assigning None clears it.

        Raises:
            ShapeError, DTypeError: on assignment, if the gradient differs from the variable in shape or dtype.
            OutOfMemoryError: if a copy of a gradient in an adapter's flat buffer does not fit.
        """
    @grad.setter
    def grad(self, /, grad: Tensor | None) -> None: ...
    def set(self, /, value: Tensor) -> None:
        """
        Overwrite the value in place.

        Raises:
            ShapeError, DTypeError, DeviceError: if `value` differs from the variable in shape, dtype or device.
        """
    def zero_grad(self, /) -> None:
        """
        Clear the gradient.
        """

@final
class ZImageTransformer(Model):
    """
    The transformer of Z-Image, with the results and the parameter names of diffusers' `ZImageTransformer2DModel`.
    `from_pretrained` loads one.
    """
    def __call__(
        self,
        /,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor | float | int,
        lengths: Tensor | None = None,
        *,
        rows_are_full: bool = False,
    ) -> Tensor:
        """
        The negative velocity (latents minus noise) that the model predicts for noisy latents.

        Args:
            hidden_states: noisy latents, (B, in_channels, h, w), shifted and scaled by the autoencoder's factors; h and
                w are even.
            encoder_hidden_states: the text's tokens, (B, L, cap_feat_dim).
            timestep: the time, (B,), (1,), or a number: 0 is noise and 1 is clean, the reverse of other flow models.
            lengths: the number of tokens of each text before its padding, (B,). The model does not read later tokens. By
                default, texts have no padding.
            rows_are_full: whether every text has L tokens, where its length and L are both rounded up to a multiple of
                32. Then attention needs no mask, which saves time. The model does not check this argument.

        Returns:
            A tensor of the shape of `hidden_states`, in the dtype of the weights.

        Raises:
            ShapeError: if the inputs do not fit the model or one another.
        """

def adapted_parts(path: str | bytes | PathLike[str] | PathLike[bytes], model: str) -> list[str]:
    """
    The parts of a family that an adapter file has adapters for, by the names of their folders in a pipeline.

    Args:
        path: the file, or peft's folder.
        model: the family, such as "sdxl".

    Raises:
        MissingFileError, WeightsFormatError: if there is no such file, or it is damaged.
        ConfigError: if there is no such family.
    """

def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: SupportsIndex | Sequence[SupportsIndex],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: SupportsFloat | SupportsIndex = ...,
) -> tuple[Tensor, Tensor]:
    """
    Compute input + residual and the `layer_norm` of this sum. Transformer blocks need both between two layers. On CUDA one kernel computes
    both.

    ```python
    total, normed = F.add_layer_norm(tc.randn(2, 8), tc.randn(2, 8), 8)
    ```

    Args:
        input: (..., *normalized_shape).
        residual: of the input's shape and dtype.
        normalized_shape: the sizes of the trailing dimensions, or the size of the last dimension.
        weight: scale, of shape `normalized_shape`.
        bias: shift, of shape `normalized_shape`.
        eps: added to the variance.

    Returns:
        The sum and its norm, both of the input's shape and dtype. The norm is computed from the sum after rounding to
        the dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
        ArgumentError: if `eps` is negative or not finite.
    """

def arange(
    start: Tensor | float | int,
    end: Tensor | float | int | None = None,
    step: Tensor | float | int | None = None,
    dtype: DType | str | None = None,
    device: str = "cpu",
) -> Tensor:
    """
    The numbers `start`, `start + step`, ... up to but not including `end`.

    ```python
    assert tc.arange(4).tolist() == [0, 1, 2, 3]
    assert tc.arange(1, 2, 0.5).tolist() == [1.0, 1.5]
    ```

    Args:
        start: the first value. If it is the only argument, it is the end, and the first value is 0.
        end: the end.
        step: the difference between neighbouring values.
        dtype: the dtype; default i64 if all arguments are integers, else f32.
        device: the device.

    Raises:
        ArgumentError: if `step` is 0 or an argument is not finite.
    """

def available_bytes() -> int | None:
    """
    Bytes of host memory that can still be allocated, if the system reports it.

    ```python
    free = tc.memory.available_bytes()
    assert free is None or free > 0
    ```
    """

def cat(tensors: SupportsGetItem[int, Tensor], dim: SupportsIndex = 0) -> Tensor:
    """
    Concatenate tensors along `dim`; all other sizes must agree.

    ```python
    assert tc.cat([tc.zeros(2, 3), tc.ones(1, 3)]).shape == (3, 3)
    ```

    Raises:
        ArgumentError: if there are no tensors.
        ShapeError: if the sizes do not agree.
        DTypeError: if the dtypes differ.
        IndexOutOfRangeError: if the dimension is out of range.
    """

def checkpoint(function: Callable[..., Any], *tensors: Tensor, policy: str = "full") -> Any:
    """
    Run `function(*tensors)` and save only a part of its intermediate results. The backward pass calls the function
    again for the others.

    The function must compute the same when it is called again. The second call gets the same random numbers, so that
    dropout has the same mask. Variables that the function captures get their gradients.

    ```python
    layer = tc.nn.Linear(4, 4)
    y = tc.checkpoint(lambda x: F.gelu(layer(x)), tc.randn(2, 4))
    y.sum().backward()  # computes the layer again
    ```

    Args:
        function: takes the tensors, returns a Tensor or a tuple of Tensors.
        tensors: its arguments; capture anything else in the function.
        policy: "full" saves only the tensors. "selective" also saves the results of matrix products and attention, so
            that only cheap operations are recomputed. "none" saves everything. "offload" is "full" with large tensors
            in the memory of the host until the backward pass.

    Returns:
        The result of the function.

    Raises:
        ArgumentError: if an argument or a result is not a Tensor, or the policy is unknown.
        The exceptions of the function.
    """

def choices() -> dict[str, list[str]]:
    """
    The names that options accept, by option: "adapter", "format", "model", "optimizer", "qat". The names of "optimizer"
    are class names in lower case.
    """

def classifier_free_guidance(
    negative: Tensor, positive: Tensor, scale: SupportsFloat | SupportsIndex
) -> Tensor:
    """
    Guide a model's output away from its output for a negative prompt (arXiv:2207.12598).

    ```python
    negative, positive = tc.zeros(2), tc.ones(2)
    assert tc.train.classifier_free_guidance(negative, positive, 7.0).tolist() == [7.0, 7.0]
    ```

    Args:
        negative: the model's output for the negative prompt.
        positive: the model's output for the prompt.
        scale: the strength of guidance; 1 gives the output for the prompt.

    Returns:
        negative + scale * (positive - negative).

    Raises:
        ShapeError, DTypeError: if the outputs differ.
    """

def clip_grad_norm_(
    parameters: Iterable[Var] | Mapping[str, Var],
    max_norm: SupportsFloat | SupportsIndex,
    norm_type: SupportsFloat | SupportsIndex = ...,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """
    Scale the gradients of `parameters` so that their total norm is at most `max_norm`, as
    `torch.nn.utils.clip_grad_norm_` does.

    ```python
    loss.backward()
    norm = tc.optim.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    ```

    Args:
        parameters: the variables; those without a gradient are ignored.
        max_norm: the largest norm, at least 0; with infinity nothing is clipped.
        norm_type: 2 for the root of the sum of squares, infinity for the largest magnitude.
        error_if_nonfinite: whether a non-finite norm is an error. The check waits for a CUDA device.

    Returns:
        The norm before scaling: a scalar in f64 on the device of the gradients. Reading its value waits for a CUDA
            device.

    Raises:
        ArgumentError: if a number is out of range, or an item is not a Var.
        NonFiniteError: if `error_if_nonfinite` is True and the norm is non-finite. In this case the gradients do not
            change.
    """

def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: SupportsIndex | Sequence[SupportsIndex] = 1,
    padding: SupportsIndex | Sequence[SupportsIndex] = 0,
    dilation: SupportsIndex | Sequence[SupportsIndex] = 1,
    groups: SupportsIndex = 1,
    *,
    channels_last: bool = False,
) -> Tensor:
    """
    Two-dimensional convolution.

    ```python
    y = F.conv2d(tc.randn(1, 3, 8, 8), tc.randn(4, 3, 3, 3), padding=1, stride=2)
    assert y.shape == (1, 4, 4, 4)
    ```

    Args:
        input: (B, C, H, W).
        weight: (O, C / groups, KH, KW).
        bias: (O,).
        stride: distance between neighbouring windows in pixels: one number or (height, width).
        padding: number of zero pixels added on each side: one number or (height, width).
        dilation: distance in pixels between neighbouring elements of the kernel: one number or (height, width).
        groups: number of groups of channels; each group is convolved separately.
        channels_last: whether the layouts are input (B, H, W, C), weight (O, KH, KW, C / groups) and result (B, OH, OW, O). This
            layout needs no copies.

    Returns:
        (B, O, OH, OW); (B, OH, OW, O) with `channels_last`.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
        ArgumentError: if a stride, a dilation or the number of groups is 0.
    """

def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: SupportsIndex = -100,
    reduction: str = "mean",
    label_smoothing: SupportsFloat | SupportsIndex = ...,
) -> Tensor:
    """
    The cross-entropy of logits and class ids.

    ```python
    loss = F.cross_entropy(tc.randn(4, 10), tc.tensor([1, 2, 3, -100]), label_smoothing=0.1)
    ```

    Args:
        input: (..., classes) logits.
        target: (...) class ids, i64 or u32.
        ignore_index: rows with this target are ignored.
        reduction: "mean" (over the rows that are not ignored), "sum", or "none" for the losses of the rows.
        label_smoothing: the fraction of each target's probability that is spread evenly over all classes, in [0, 1].

    Raises:
        ShapeError, DTypeError: if the operands do not fit.
        IndexOutOfRangeError: if a target is not a class.
        ArgumentError: if the reduction is unknown or `label_smoothing` is out of range.
    """

def cuda_bus_id(device: str) -> str:
    """
    The address of a CUDA device on the PCI bus, which names the device in all processes of the machine.

    Raises:
        DeviceError, CudaUnavailableError: if it is not a CUDA device or the driver reports an error.
    """

def cuda_device_count() -> int:
    """
    The number of CUDA devices.

    Raises:
        CudaUnavailableError: if CUDA cannot be used.
    """

def cuda_device_name(device: str) -> str:
    """
    The name of a CUDA device, as its manufacturer gives it.

    Raises:
        DeviceError, CudaUnavailableError: if `device` is not a CUDA device or the driver reports an error.
    """

def cuda_empty_cache(device: str) -> int:
    """
    Release the cached memory of a CUDA device; returns the number of bytes released.

    Raises:
        DeviceError, CudaUnavailableError: if `device` is not a CUDA device or the driver reports an error.
    """

def cuda_finish_profile() -> list[tuple[str, int, float]]:
    """
    Wait for the device; returns (name, launches, milliseconds) of each kernel since `cuda_start_profile`, the longest first.

    Raises:
        ArgumentError: if no launches are being measured.
        DeviceError: if a kernel failed.
    """

def cuda_link(device: str, bus_id: str) -> str | None:
    """
    How a CUDA device reads the memory of the device whose address on the bus is `bus_id`: "nvlink", "bus" or "none". None if this process
    does not see that device, or if it is `device` itself.

    Raises:
        DeviceError, CudaUnavailableError: if it is not a CUDA device or the driver reports an error.
    """

def cuda_memory_stats(device: str) -> list[int]:
    """
    Memory statistics of a CUDA device, in this order: bytes allocated and their peak; bytes reserved and their peak;
    bytes reserved by captured graphs; the numbers of allocations, of mappings of device memory and of retries; bytes
    free on the device and in total.

    Raises:
        DeviceError, CudaUnavailableError: if `device` is not a CUDA device or the driver reports an error.
    """

def cuda_reset_peak_memory_stats(device: str) -> None:
    """
    Reset the memory peaks of a CUDA device to the current values.

    Raises:
        DeviceError, CudaUnavailableError: if `device` is not a CUDA device or the driver reports an error.
    """

def cuda_set_memory_limit(device: str, limit: SupportsIndex | None) -> None:
    """
    Limit the bytes of a CUDA device's memory that tensors and workspaces may take; None removes the limit.

    Raises:
        DeviceError, CudaUnavailableError: if `device` is not a CUDA device.
    """

def cuda_stages_weights(device: str) -> bool:
    """
    Whether streamed weights of a device are in host memory that is not pinned, because the system gives too little of
    that. CUDA graphs cannot copy them.

    Raises:
        DeviceError, CudaUnavailableError: if there is no such device.
    """

def cuda_start_profile(device: str) -> None:
    """
    Measure every launch on a CUDA device from now on.

    Raises:
        DeviceError, CudaUnavailableError: if `device` is not a CUDA device.
        ArgumentError: if launches are already being measured.
    """

def cuda_synchronize(device: str) -> None:
    """
    Wait until all work queued on a CUDA device is done.

    Raises:
        DeviceError, CudaUnavailableError: if `device` is not a CUDA device or a kernel failed.
    """

def cuda_unavailable_reason() -> str | None:
    """
    Why CUDA cannot be used, or None if it can.
    """

def draw_from(seed: SupportsIndex, function: Callable[..., Any]) -> Any:
    """
    Call `function` with a separate generator. The generator gives the random numbers that follow `manual_seed(seed)`.
    The state of the library's generator does not change.

    Args:
        seed: the seed of the separate generator, 0 to 2**64 - 1.
        function: called without arguments.

    Returns:
        The result of `function`.
    """

def dropout(input: Tensor, p: SupportsFloat | SupportsIndex = ..., training: bool = True) -> Tensor:
    """
    Zero each element with probability `p` and scale the others by 1 / (1 - p) (Srivastava et al. 2014).

    ```python
    x = tc.ones(1000)
    assert set(F.dropout(x, 0.5).tolist()) == {0.0, 2.0}
    assert F.dropout(x, 0.5, training=False).tolist() == x.tolist()
    ```

    Args:
        input: any shape.
        p: the probability of zeroing an element, in [0, 1].
        training: if False, return the input unchanged.

    Raises:
        ArgumentError: if `p` is out of range.
        DTypeError: if the input is not floating point.
    """

def embedding(input: Tensor, weight: Tensor) -> Tensor:
    """
    The rows of a table at given indices.

    ```python
    table = tc.Var(tc.randn(100, 8))
    assert F.embedding(tc.tensor([[1, 2, 3]]), table).shape == (1, 3, 8)
    ```

    Args:
        input: indices of rows, i64 or u32, of any shape.
        weight: the table, (entries, features).

    Returns:
        (..., features), where ... is the shape of `input`.

    Raises:
        IndexOutOfRangeError: if an index is not in 0 to entries - 1.
        ShapeError, DTypeError: if the operands do not fit.
    """

def empty_like(
    input: Tensor, dtype: DType | str | None = None, device: str | None = None
) -> Tensor:
    """
    A tensor with arbitrary values in the shape of `input`, by default with its dtype and on its device.

    ```python
    x = tc.tensor([1, 2, 3])
    assert tc.empty_like(x, dtype="f32").shape == x.shape
    ```
    """

def eye(
    n: SupportsIndex,
    m: SupportsIndex | None = None,
    dtype: DType | str | None = None,
    device: str = "cpu",
) -> Tensor:
    """
    The identity matrix (n, m): ones on the diagonal, zeros elsewhere.

    ```python
    assert tc.eye(2).tolist() == [[1.0, 0.0], [0.0, 1.0]]
    ```

    Args:
        n: rows.
        m: columns; default `n`.
        dtype: the dtype; default f32.
        device: the device.

    Raises:
        OutOfMemoryError: if the tensor does not fit into memory.
    """

def fake_quantize(input: Tensor, format: str, factors: Tensor | None = None) -> Tensor:
    """
    Round a matrix to the values that an 8-bit or 4-bit format can represent; the result keeps the dtype of the input. The backward pass
    is the straight-through estimator: an element gets the gradient of its rounded value if its code is within the format's range, and 0
    otherwise. The backward pass treats scales as constants. `factors` get the gradient of LSQ, equation 3
    (<https://arxiv.org/abs/1902.08153>).

    ```python
    weight = tc.Var(tc.randn(64, 64))
    y = F.linear(tc.randn(2, 64), F.fake_quantize(weight, "int8"))
    y.sum().backward()  # as if nothing had been rounded
    ```

    Args:
        input: floating point, (out_features, in_features).
        format: "int8" or "fp8" rounds as `quantize` followed by `dequantize` does. "nf4" does the same, but keeps scales in f32.
            "int4" is the format of torchao's symmetric weights: integers from -8 to 7, with one scale for each 32 elements of a row.
        factors: one factor for each scale, row after row; each scale is multiplied by its factor.

    Returns:
        the rounded matrix, in the shape and dtype of the input.

    Raises:
        ShapeError: if the input is not a matrix, or does not consist of whole groups ("int4": 32 elements of a row; "nf4": 64 elements
            of the matrix), or if the number of factors differs from the number of scales.
        DTypeError: if the input is not floating point.
        ArgumentError: if the format is unknown.
    """

def from_dlpack(data: Any) -> Tensor:
    """
    Make a tensor with a copy of the values of an object with `__dlpack__`, on the device of the values.

    ```python
    assert tc.from_dlpack(np.array([1.0, 2.0])).tolist() == [1.0, 2.0]
    ```

    Raises:
        DeviceError: if the values are neither on the CPU nor on a CUDA device.
        CudaUnavailableError: if the values are on a CUDA device and CUDA cannot be used.
        DTypeError: if no dtype can represent the values.
    """

def full(
    shape: SupportsIndex | Sequence[SupportsIndex],
    value: Tensor | float | int,
    dtype: DType | str | None = None,
    device: str = "cpu",
) -> Tensor:
    """
    A tensor whose elements all have one value.

    Args:
        shape: the sizes.
        value: the value.
        dtype: the dtype; default f32 for a float and i64 for an integer.
        device: the device.

    Raises:
        ArgumentError, DTypeError: if an integer dtype cannot represent the value.
        OutOfMemoryError: if the tensor does not fit into memory.
    """

def geglu(input: Tensor) -> Tensor:
    """
    `h * gelu(gate)`, where h is the first half of the last dimension and gate the second (Shazeer 2020, arXiv:2002.05202).

    ```python
    assert F.geglu(tc.randn(2, 8)).shape == (2, 4)
    ```

    Args:
        input: (..., 2 * n).

    Returns:
        (..., n).

    Raises:
        ShapeError: if the last dimension is odd.
        DTypeError: if the input is not floating point.
    """

def get_float32_matmul_precision() -> str:
    """
    How products of f32 matrices are computed on CUDA devices: "highest" or "high".

    ```python
    tc.set_float32_matmul_precision("high")
    assert tc.get_float32_matmul_precision() == "high"
    tc.set_float32_matmul_precision("highest")
    ```
    """

def get_num_threads() -> int:
    """
    The number of threads of CPU work.

    ```python
    before = tc.get_num_threads()
    tc.set_num_threads(1)
    tc.set_num_threads(before)
    ```
    """

def get_rng_state() -> tuple[int, int]:
    """
    The state of the generator, (seed, position). Draws after `set_rng_state(state)` repeat the draws that followed this call.

    ```python
    state = tc.get_rng_state()
    drawn = tc.randn(3)
    tc.set_rng_state(state)
    assert tc.randn(3).tolist() == drawn.tolist()
    ```
    """

def get_w8a8() -> bool:
    """
    Whether linear layers with int8 or fp8 weights multiply codes; see `set_w8a8`.
    """

def gguf_facts(path: str | bytes | PathLike[str] | PathLike[bytes]) -> dict[str, Any] | None:
    """
    The metadata of a GGUF file about its model, under the format's names; None for other files.

    Raises:
        MissingFileError, WeightsFormatError: if there is no such file, or it is damaged.
    """

def grad(
    loss: Tensor,
    inputs: Tensor | Sequence[Tensor],
    gradient: Tensor | None = None,
    retain_graph: bool = False,
) -> list[Tensor | None]:
    """
    Compute the gradients of `loss` with respect to `inputs`, without changing any `.grad`.

    ```python
    x = tc.Var([3.0])
    (dx,) = tc.grad((x * x).sum(), x)
    assert dx.tolist() == [6.0] and x.grad is None
    ```

    Args:
        loss: a tensor on the tape.
        inputs: variables, or any tensors on the tape.
        gradient: the gradient of `loss`, in its shape; not needed for a single element.
        retain_graph: whether the graph can be differentiated again.

    Returns:
        One gradient for each input; None for an input on which the loss does not depend.

    Raises:
        AutogradError: as `backward`, and if an input does not require a gradient.
        ShapeError: as `backward`.
    """

def gradcheck(
    function: Callable[..., Any],
    inputs: Tensor | Sequence[Tensor],
    eps: SupportsFloat | SupportsIndex = ...,
    atol: SupportsFloat | SupportsIndex = ...,
    rtol: SupportsFloat | SupportsIndex = ...,
) -> bool:
    """
    Check the gradient of `function` at `inputs` against central differences in f64:
    `|analytic - numeric| <= atol + rtol * |numeric|` for every entry.

    ```python
    assert tc.gradcheck(lambda x: x.tanh() * x, tc.randn(3, dtype="f64"))
    ```

    Args:
        function: takes the inputs, returns a Tensor of any shape.
        inputs: one or several f64 tensors.
        eps: step of the differences.
        atol: absolute tolerance.
        rtol: relative tolerance.

    Returns:
        True.

    Raises:
        AutogradError: if the difference of an entry exceeds the tolerance. The message names the worst entry.
        DTypeError: if an input is not f64.
        The exceptions of the function.
    """

def gradient_vectors(parameters: Iterable[Var] | Mapping[str, Var]) -> list[Tensor]:
    """
    Return the gradients of variables as vectors. Gradients that are adjacent in a flat buffer are one vector. Missing
    gradients are zeros.

    Raises:
        OutOfMemoryError: if the vectors do not fit.
    """

def group_norm(
    input: Tensor,
    num_groups: SupportsIndex,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: SupportsFloat | SupportsIndex = ...,
    *,
    channels_last: bool = False,
) -> Tensor:
    """
    Group normalisation (Wu & He 2018, arXiv:1803.08494).

    ```python
    assert F.group_norm(tc.randn(1, 8, 4, 4), 2).shape == (1, 8, 4, 4)
    ```

    Args:
        input: (B, C, ...).
        num_groups: the number of groups of channels, a divisor of C.
        weight: scale, (C,).
        bias: shift, (C,).
        eps: added to the variance.
        channels_last: whether the layout of input and result is (B, ..., C). This layout needs no copies.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
        ArgumentError: if `num_groups` does not divide C, or `eps` is negative or not finite.
    """

def group_norm_silu(
    input: Tensor,
    num_groups: SupportsIndex,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: SupportsFloat | SupportsIndex = ...,
    *,
    channels_last: bool = False,
) -> Tensor:
    """
    SiLU of `group_norm`, in one operation. The tape does not save the norm's result.

    ```python
    assert F.group_norm_silu(tc.randn(1, 8, 4, 4), 2).shape == (1, 8, 4, 4)
    ```

    Args:
        input: (B, C, ...).
        num_groups: the number of groups of channels, a divisor of C.
        weight: scale, (C,).
        bias: shift, (C,).
        eps: added to the variance.
        channels_last: whether the layout of input and result is (B, ..., C). This layout needs no copies.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
        ArgumentError: if `num_groups` does not divide C, or `eps` is negative or not finite.
    """

def huber_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: SupportsFloat | SupportsIndex = ...,
) -> Tensor:
    """
    The Huber loss (Huber 1964): half the square of a difference of at most `delta`, linear for a larger one.

    ```python
    loss = F.huber_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]))
    each = F.huber_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]), reduction="none")
    assert loss.item() == each.mean().item()
    ```

    Args:
        input: any shape.
        target: the same shape.
        reduction: "mean", "sum", or "none" for the losses of the elements.
        delta: the difference from which the loss is linear, above 0.

    Raises:
        ShapeError, DTypeError: if the operands do not fit.
        ArgumentError: if the reduction is unknown or `delta` is not above 0.
    """

def init_linear(
    in_features: SupportsIndex,
    out_features: SupportsIndex,
    bias: bool = True,
    dtype: DType | str | None = None,
    device: str = "cpu",
) -> tuple[Var, Var | None]:
    """
    Initial parameters of a linear layer: weight (out_features, in_features) and bias (out_features,), uniform in +-1 /
    sqrt(in_features), as torch initializes them.

    Raises:
        OutOfMemoryError: if the parameters do not fit into memory.
        DTypeError: if the dtype is not floating point.
    """

def inspect(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    model: str | None = None,
    others: SupportsGetItem[int, str | bytes | PathLike[str] | PathLike[bytes]] = ...,
) -> CheckpointFacts:
    """
    Determine the contents of a checkpoint from its headers and configurations, without reading weights.

    ```python
    assert tc.inspect("sdxl").resolution == 128  # the built-in one
    ```

    Args:
        path: a pipeline's folder, an original checkpoint in one file, or a single model.
        model: the family, such as "sdxl". If it is given, all models of this family must exist.
        others: folders and files of single text encoders and autoencoders, which replace those of `path`.

    Raises:
        MissingFileError: if nothing is at `path`.
        WeightsFormatError: if a file is damaged, or a part of the family is missing.
        ConfigError: if a configuration is wrong, or there is no such family.
    """

def is_grad_enabled() -> bool:
    """
    Whether operations of this thread are recorded.

    ```python
    with tc.no_grad():
        assert not tc.is_grad_enabled()
    ```
    """

def l1_loss(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """
    The mean absolute error.

    ```python
    loss = F.l1_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]))
    each = F.l1_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]), reduction="none")
    assert loss.item() == each.mean().item()
    ```

    Args:
        input: any shape.
        target: the same shape.
        reduction: "mean", "sum", or "none" for the losses of the elements.

    Raises:
        ShapeError, DTypeError: if the operands do not fit.
        ArgumentError: if the reduction is unknown.
    """

def layer_norm(
    input: Tensor,
    normalized_shape: SupportsIndex | Sequence[SupportsIndex],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: SupportsFloat | SupportsIndex = ...,
) -> Tensor:
    """
    Layer normalisation (Ba et al. 2016, arXiv:1607.06450) over the trailing dimensions.

    ```python
    y = F.layer_norm(tc.randn(2, 8), 8, weight=tc.ones(8))
    assert y.shape == (2, 8)
    ```

    Args:
        input: (..., *normalized_shape).
        normalized_shape: the sizes of the trailing dimensions, or the size of the last dimension.
        weight: scale, of shape `normalized_shape`.
        bias: shift, of shape `normalized_shape`.
        eps: added to the variance.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
        ArgumentError: if `eps` is negative or not finite.
    """

def linear(input: Tensor, weight: Tensor | QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """
    `input @ weight.T + bias`.

    ```python
    y = F.linear(tc.randn(3, 4), tc.randn(2, 4), tc.zeros(2))
    assert y.shape == (3, 2)
    ```

    Args:
        input: (..., in_features).
        weight: (out_features, in_features), or a quantized matrix that `quantize` returned. A quantized matrix gets no gradient. The
            tape saves the input for the backward pass only if the weight needs a gradient.
        bias: (out_features,).

    Returns:
        (..., out_features).

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
    """

def linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, weights: Tensor | None = None
) -> Tensor:
    """
    The sum of the cross-entropies of `input @ weight.T` and class ids, a scalar in f32 (f64 for f64). It is computed
    some rows at a time, without a matrix of all logits, and its gradients are computed together with it.

    ```python
    states, head, ids = tc.randn(3, 8), tc.randn(100, 8), tc.tensor([5, 7, -100])
    found = F.linear_cross_entropy(states, head, ids)
    assert tc.allclose(found, F.cross_entropy(states @ head.T, ids, reduction="sum"), rtol=1e-4)
    ```

    Args:
        input: (N, D) states.
        weight: (classes, D), in the dtype of the states. The gradient of a frozen weight is not computed.
        target: (N) class ids, i64 or u32; rows with -100 are ignored.
        weights: (N) f32, a factor of each row's loss. The factors get no gradient. Default: all 1.

    Raises:
        ShapeError, DTypeError: if the operands do not fit.
        IndexOutOfRangeError: if a target is not a class.
        NoBackwardError: if `weights` needs a gradient.
    """

def linear_log_probs(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """
    For each row, the logarithm of the probability of its class id under the softmax of `input @ weight.T`: (N), in f32
    (f64 for f64 input). The scores are computed for some rows at a time, and again in the backward pass.

    ```python
    states, head = tc.randn(3, 8), tc.randn(100, 8)
    assert F.linear_log_probs(states, head, tc.tensor([5, 7, -100])).shape == (3,)
    ```

    Args:
        input: (N, D) states.
        weight: (classes, D), in the dtype of the states.
        target: (N) class ids, i64 or u32; rows with -100 give 0.

    Raises:
        ShapeError, DTypeError: if the operands do not fit.
        IndexOutOfRangeError: if a target is not a class.
    """

def load_file(
    path: str | bytes | PathLike[str] | PathLike[bytes], device: str = "cpu"
) -> dict[str, Tensor]:
    """
    Read a safetensors file.

    ```python
    tc.save_file({"a": tc.ones(2)}, "tensors.safetensors", metadata={"made": "here"})
    assert tc.load_file("tensors.safetensors")["a"].tolist() == [1.0, 1.0]
    ```

    Args:
        path: the file.
        device: the device of the tensors.

    Returns:
        Tensors by name.

    Raises:
        MissingFileError: if there is no such file.
        WeightsFormatError: if it is not a safetensors file, or holds a dtype that is not supported.
    """

def lora_backward(
    grad_output: Tensor,
    input: Tensor,
    lora_down: Tensor,
    lora_up: Tensor,
    scale: SupportsFloat | SupportsIndex,
) -> tuple[Tensor, Tensor]:
    """
    The gradients of the two matrices of y = scale * (input @ lora_down.T) @ lora_up.T.

    ```python
    x, down, up = tc.randn(5, 8), tc.randn(2, 8), tc.randn(4, 2)
    grad_down, grad_up = tc.lora_backward(tc.ones(5, 4), x, down, up, 0.5)
    assert (grad_down.shape, grad_up.shape) == (down.shape, up.shape)
    ```

    Args:
        grad_output: (..., out_features), the gradient of y.
        input: (..., in_features).
        lora_down: (rank, in_features).
        lora_up: (out_features, rank).
        scale: the factor `scale` in the formula.

    Returns:
        (grad_down, grad_up), in the shapes of `lora_down` and `lora_up`. Their dtype is f32 if the input is f16 or bf16, else the dtype
        of the input.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
    """

def lora_backward_(
    grad_outputs: SupportsGetItem[int, Tensor],
    inputs: SupportsGetItem[int, Tensor],
    lora_downs: SupportsGetItem[int, Var],
    lora_ups: SupportsGetItem[int, Var],
    scale: SupportsFloat | SupportsIndex,
) -> None:
    """
    Compute `lora_backward` of many layers at once, and add the results to the gradients of the matrices. Gradients that are in a flat
    buffer change in place. On a CUDA device, matrix products of equal size run in one launch, without synchronization.

    ```python
    x, down, up = tc.randn(5, 8), tc.Var(tc.randn(2, 8)), tc.Var(tc.randn(4, 2))
    tc.lora_backward_([tc.ones(5, 4)], [x], [down], [up], 0.5)
    assert down.grad.shape == down.shape
    ```

    Args:
        grad_outputs: one tensor (..., out_features) for each layer.
        inputs: one tensor (..., in_features) for each layer.
        lora_downs: one variable (rank, in_features) for each layer.
        lora_ups: one variable (out_features, rank) for each layer.
        scale: the factor `scale` of `lora_backward`, the same for all layers.

    Raises:
        ArgumentError: if the lists have different lengths, or the scale is not finite.
        ShapeError, DTypeError, DeviceError: if the operands of a layer do not fit together. No gradient changes in this case.
    """

def manual_seed(seed: SupportsIndex) -> None:
    """
    Set the seed of the library's generator, and start its sequence of random numbers from the beginning.

    ```python
    tc.manual_seed(0)
    drawn = tc.randn(3)
    tc.manual_seed(0)
    assert tc.randn(3).tolist() == drawn.tolist()
    ```

    Args:
        seed: 0 to 2**64 - 1.
    """

def memory_machine() -> str | None:
    """
    Return a name that identifies the machine, the process namespace and the user: processes with equal names can share memory. None if the
    system does not provide this information.
    """

def modulated_layer_norm(
    input: Tensor, scale: Tensor, shift: Tensor, eps: SupportsFloat | SupportsIndex = ...
) -> Tensor:
    """
    Layer normalisation of the last dimension, times 1 + scale, plus shift. Each example has its own scale and shift, as
    in adaLN of diffusion transformers (Peebles & Xie 2022, arXiv:2212.09748).

    ```python
    y = F.modulated_layer_norm(tc.randn(2, 16, 8), tc.zeros(2, 8), tc.zeros(2, 8))
    assert y.shape == (2, 16, 8)
    ```

    Args:
        input: (B, ..., features).
        scale: (B, features).
        shift: (B, features).
        eps: added to the variance.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
        ArgumentError: if `eps` is negative or not finite.
    """

def mse_loss(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """
    The mean squared error.

    ```python
    loss = F.mse_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]))
    each = F.mse_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]), reduction="none")
    assert loss.item() == each.mean().item()
    ```

    Args:
        input: any shape.
        target: the same shape.
        reduction: "mean", "sum", or "none" for the losses of the elements.

    Raises:
        ShapeError, DTypeError: if the operands do not fit.
        ArgumentError: if the reduction is unknown.
    """

def nccl_unique_id() -> bytes:
    """
    Return 128 bytes by which the processes of a group find each other. The calling process must be rank 0.

    Raises:
        CudaUnavailableError: if NCCL cannot be used.
        DeviceError: if NCCL finds no network interface to listen on.
    """

def nccl_version() -> int:
    """
    Return the version of NCCL, such as 23007 for 2.30.7.

    Raises:
        CudaUnavailableError: if NCCL cannot be used.
    """

def normal_samples(
    shape: SupportsGetItem[int, SupportsIndex],
    samples: SupportsGetItem[int, SupportsIndex],
    seed: SupportsIndex,
    purpose: str,
) -> Tensor:
    """
    Standard normal values for the samples of a batch. Each sample has its own stream of random numbers, so its values do not depend on
    the other samples of the batch.

    Args:
        shape: the shape of the values of one sample.
        samples: the indices of the samples in the run.
        seed: the seed of the run.
        purpose: the name of the random numbers' purpose.

    Returns:
        (B, *shape), f32: one entry for each of the B samples.

    Raises:
        ArgumentError: if no purpose has this name.
    """

def ones(
    *shape: int | tuple[int, ...] | list[int], dtype: DType | str | None = None, device: str = "cpu"
) -> Tensor:
    """
    Ones.

    Args:
        shape: the sizes, as arguments or one sequence.
        dtype: the dtype; default f32.
        device: the device.

    Raises:
        OutOfMemoryError: if the tensor does not fit into memory.
    """

def ones_like(input: Tensor, dtype: DType | str | None = None, device: str | None = None) -> Tensor:
    """
    Ones in the shape of `input`, by default with its dtype and on its device.

    ```python
    x = tc.tensor([1, 2, 3])
    assert tc.ones_like(x, dtype="f32").shape == x.shape
    ```
    """

def optimizer_kinds() -> list[tuple[str, str, int, dict[str, Any]]]:
    """
    The optimizers of the library's registry. Each is a tuple of its name, its docstring, the number of hyper-parameters
    that may be passed by position, and all hyper-parameters with their defaults, in order.
    """

def pipeline_parts(model: str) -> list[str]:
    """
    The parts of a family by the names of their folders in a pipeline.

    Raises:
        ConfigError: if there is no such family.
    """

def prepare_adapters(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    adapters: SupportsGetItem[int, AdapterSet],
    format: str | None = None,
    metadata: dict[str, str] | None = ...,
    dtype: DType | str | None = None,
) -> AdapterFile:
    """
    Copy to the CPU everything that `save_adapters` would write, so that another thread can write it while training
    continues.

    ```python
    unet = tc.models.load("sdxl")
    adapter = unet.load_adapter("adapter.safetensors")
    file = tc.prepare_adapters("copy.safetensors", [adapter], dtype="bf16")
    file.write()  # in another thread, while training continues
    ```

    Args:
        path: the file.
        adapters: the adapters of each model.
        format: "kohya" (the default for SDXL), "diffusers" or "comfyui".
        metadata: text entries for the file's header, in addition to those for other tools.
        dtype: the dtype of the parameters, "f32", "f16" or "bf16".

    Raises:
        ArgumentError: if the format is unknown or cannot hold these adapters.
    """

def quantize(tensor: Tensor, format: str) -> QuantizedTensor:
    """
    Quantize a frozen matrix.

    ```python
    weight = tc.randn(64, 128)
    codes = tc.quantize(weight, "nf4")
    assert (codes.dequantize() - weight).abs().mean().item() < 0.1
    ```

    Args:
        tensor: floating point, (out_features, in_features).
        format: "int8" for integers with a scale per row; "fp8" for e4m3 numbers with a scale per row; "nf4" for four
            bits as in bitsandbytes, in blocks of 64 elements whose scales are quantized in blocks of 256; "q8_0" or
            "q4_0" for blocks of 32 elements of a row, each with a scale, as in GGUF files.

    Raises:
        ShapeError: if the tensor is not a matrix, or its rows do not divide into blocks.
        DTypeError: if it is not floating point.
        ArgumentError: if the format is unknown, or if the tensor requires a gradient or has non-finite values.
    """

def quick_gelu(input: Tensor) -> Tensor:
    """
    `input * sigmoid(1.702 * input)`, an approximation of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415), used by CLIP.

    ```python
    assert F.quick_gelu(tc.tensor([0.0, 10.0])).tolist() == [0.0, 10.0]
    ```

    Raises:
        DTypeError: if the input is not floating point.
    """

def rand(
    *shape: int | tuple[int, ...] | list[int], dtype: DType | str | None = None, device: str = "cpu"
) -> Tensor:
    """
    Uniform values in [0, 1) from the library's generator (`manual_seed`).

    Args:
        shape: the sizes, as arguments or one sequence.
        dtype: a floating point dtype; default f32.
        device: the device.

    Raises:
        DTypeError: if the dtype is not floating point.
        OutOfMemoryError: if the tensor does not fit into memory.
    """

def randint(
    low: SupportsIndex,
    high: SupportsIndex,
    shape: SupportsIndex | Sequence[SupportsIndex],
    device: str = "cpu",
) -> Tensor:
    """
    Integers in [low, high) from the library's generator (`manual_seed`), i64.

    Args:
        low: the smallest value.
        high: one more than the largest value.
        shape: the sizes.
        device: the device.

    Raises:
        ArgumentError: if the range is empty or has more than 2**32 - 1 values.
        OutOfMemoryError: if the tensor does not fit into memory.
    """

def randn(
    *shape: int | tuple[int, ...] | list[int], dtype: DType | str | None = None, device: str = "cpu"
) -> Tensor:
    """
    Standard normal values from the library's generator (`manual_seed`).

    Args:
        shape: the sizes, as arguments or one sequence.
        dtype: a floating point dtype; default f32.
        device: the device.

    Raises:
        DTypeError: if the dtype is not floating point.
        OutOfMemoryError: if the tensor does not fit into memory.
    """

def rms_norm(
    input: Tensor,
    normalized_shape: SupportsIndex | Sequence[SupportsIndex],
    weight: Tensor | None = None,
    eps: SupportsFloat | SupportsIndex = ...,
) -> Tensor:
    """
    Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv:1910.07467) of the last dimension.

    ```python
    y = F.rms_norm(tc.randn(2, 8), 8, weight=tc.ones(8))
    assert y.shape == (2, 8)
    ```

    Args:
        input: (..., features).
        normalized_shape: (features,) or features.
        weight: scale, (features,).
        eps: added to the mean square.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
        ArgumentError: if `eps` is negative or not finite.
    """

def rms_norm_rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    eps: SupportsFloat | SupportsIndex = ...,
) -> Tensor:
    """
    `rope(rms_norm(x, D, weight, eps), cos, sin, interleaved)` in one operation, for the queries and keys of Flux and Qwen3.

    ```python
    angles = tc.randn(16, 4)
    queries = F.rms_norm_rope(tc.randn(2, 16, 8), tc.ones(8), angles.cos(), angles.sin())
    assert queries.shape == (2, 16, 8)
    ```

    Args:
        x: (..., S, D), D even.
        weight: scale, (D,), in the dtype of `x` or f32; None for ones.
        cos: (S, D / 2), cosines of the angles.
        sin: (S, D / 2), sines of the angles.
        interleaved: whether pair i consists of features 2 * i and 2 * i + 1, instead of features i and i + D / 2.
        eps: added to the mean square.

    Returns:
        A tensor of the shape and dtype of `x`. Intermediate results are not rounded to that dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
        ArgumentError: if `eps` is negative or not finite.
        NoBackwardError: if `cos` or `sin` needs a gradient.
    """

def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """
    Rotary position embedding (Su et al. 2021, arXiv:2104.09864): rotate each pair of features by an angle.

    ```python
    angles = tc.arange(16.0).reshape(16, 1) * tc.tensor([1.0, 0.1, 0.01, 0.001])
    queries = F.rope(tc.randn(2, 16, 8), angles.cos(), angles.sin())
    assert queries.shape == (2, 16, 8)
    ```

    Args:
        x: (..., S, D), D even.
        cos: (S, D / 2), cosines of the angles.
        sin: (S, D / 2), sines of the angles.
        interleaved: whether pair i consists of features 2 * i and 2 * i + 1, instead of features i and i + D / 2.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
    """

def save_adapters(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    adapters: SupportsGetItem[int, AdapterSet],
    format: str | None = None,
    metadata: dict[str, str] | None = ...,
    dtype: DType | str | None = None,
) -> list[str]:
    """
    Write the adapters of several models, such as a UNet and its text encoders, to one safetensors file.

    ```python
    unet = tc.models.load("sdxl")
    adapter = unet.load_adapter("adapter.safetensors")
    assert tc.save_adapters("copy.safetensors", [adapter], format="diffusers", dtype="f16") == []
    ```

    Args:
        path: the file.
        adapters: the adapters of each model.
        format: "kohya" (the default for SDXL), "diffusers" or "comfyui".
        metadata: text entries for the file's header, in addition to those for other tools.
        dtype: the dtype of the parameters, "f32", "f16" or "bf16".

    Returns:
        The names of layers whose adapter has no effect, because a factor is zero everywhere.

    Raises:
        FileError: if the file cannot be written.
        ArgumentError: if the format is unknown or cannot hold these adapters.
    """

def save_checkpoint(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    models: dict[str, Model],
    base: str | bytes | PathLike[str] | PathLike[bytes] | None = None,
    dtype: DType | str | None = None,
    quantize: dict[str, str] | None = ...,
) -> None:
    """
    Write models to one file under the names of the original checkpoints, as ComfyUI and others read them.

    ```python
    unet = tc.models.SDXLUNet.from_pretrained("sdxl")
    tc.models.save_checkpoint("checkpoint.safetensors", {"unet": unet}, dtype="f16")
    ```

    Args:
        path: the file.
        models: the models, by the names of their folders in a pipeline: "unet", "vae", "text_encoder",
            "text_encoder_2". Adapters are not written, but a merged adapter is part of its layer's weight.
        base: a checkpoint whose other tensors are copied unchanged.
        dtype: convert the weights of the models.
        quantize: the format of each model to quantize, "fp8" or "int8", by the name of its folder. The linear layers of
            the model are written as ComfyUI stores them: "fp8" as e4m3 numbers with a scale per tensor, "int8" as
            integers with a scale per row.

    Raises:
        ArgumentError: if a model does not fit the name of its folder, if it has no layers that may be quantized, or if
            a format is unknown.
        FileError, MissingFileError: if a file cannot be written or read.
    """

def save_file(
    tensors: dict[str, Tensor],
    path: str | bytes | PathLike[str] | PathLike[bytes],
    metadata: dict[str, str] | None = ...,
    codes: dict[str, str] | None = ...,
) -> None:
    """
    Write tensors to a safetensors file. If writing fails, no incomplete file remains.

    ```python
    tc.save_file({"a": tc.ones(2)}, "tensors.safetensors", metadata={"made": "here"})
    assert tc.load_file("tensors.safetensors")["a"].tolist() == [1.0, 1.0]
    ```

    Args:
        tensors: tensors by name.
        path: the file.
        metadata: text entries for the file's header.
        codes: for each u8 tensor that holds the codes of a QuantizedTensor, by name, the kind of numbers that the codes
            represent: "int8" or "fp8" (e4m3).

    Raises:
        FileError: if the file cannot be written.
        ArgumentError: if a name in `codes` is not among `tensors`, or a kind is neither "int8" nor "fp8".
        DTypeError: if a tensor of codes is not u8, or if safetensors files do not support the dtype of a tensor.
    """

def saved_bytes() -> int:
    """
    Bytes that existing tapes save for backward passes: activations and the inputs of checkpoints. Each storage counts
    once; parameters do not count.

    ```python
    x = tc.Var(tc.ones(1000))
    y = x.exp()
    assert tc.memory.saved_bytes() >= y.nbytes
    ```
    """

def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: SupportsFloat | SupportsIndex | None = ...,
) -> Tensor:
    """
    softmax(query @ key.T * scale + mask) @ value (Vaswani et al. 2017, arXiv:1706.03762). The matrix of scores is never stored.

    ```python
    q, k, v = (tc.randn(1, 2, 16, 8) for _ in range(3))  # one text, two heads, 16 tokens
    assert F.scaled_dot_product_attention(q, k, v, is_causal=True).shape == (1, 2, 16, 8)
    ```

    Args:
        query: (..., S, D).
        key: (..., L, D).
        value: (..., L, Dv).
        attn_mask: broadcastable to (..., S, L). A u8 mask is 1 where a query attends to a key and 0 elsewhere; a floating-point mask is
            added to the scores.
        is_causal: whether the query at position i attends only to keys at positions 0 to i.
        scale: factor of the scores; default 1 / sqrt(D).

    Returns:
        (..., S, Dv).

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
    """

def set_float32_matmul_precision(precision: str) -> None:
    """
    Choose how products of f32 matrices are computed on CUDA devices, as torch's function of the same name does.

    ```python
    tc.set_float32_matmul_precision("high")
    assert tc.get_float32_matmul_precision() == "high"
    tc.set_float32_matmul_precision("highest")
    ```

    Args:
        precision: "highest" for f32, the default; "high" for TF32, which is several times as fast on tensor cores, but
            rounds both factors to a mantissa of 10 bits. It affects neither other dtypes nor the CPU.

    Raises:
        ArgumentError: if the precision is another value.
    """

def set_grad_enabled(enabled: bool) -> bool:
    """
    Enable or disable recording on this thread; returns the previous state.
    """

def set_gradient_vectors(
    parameters: Iterable[Var] | Mapping[str, Var], vectors: SupportsGetItem[int, Tensor]
) -> None:
    """
    Overwrite the gradients of variables with vectors of the sizes that `gradient_vectors` returns.

    Raises:
        ArgumentError: if there are more or fewer vectors.
        ShapeError, DTypeError, DeviceError: if a vector has another size, dtype or device than its gradients.
    """

def set_num_threads(n: SupportsIndex) -> None:
    """
    Set the number of threads of CPU work. Results do not depend on it.

    ```python
    before = tc.get_num_threads()
    tc.set_num_threads(1)
    tc.set_num_threads(before)
    ```

    Raises:
        ArgumentError: if `n` is 0, or the system cannot start so many threads.
    """

def set_resolver(resolve: Callable[..., Any]) -> None:
    """
    Set the function that finds models by names that are not paths. Only the first call has an effect.

    Args:
        resolve: a function with three arguments: the name, the folders of a repository that may contain the model (the
            most likely first), and whether half-precision files are preferred. It returns a folder, or None if it
            cannot resolve the name.
    """

def set_rng_state(state: tuple[SupportsIndex, SupportsIndex]) -> None:
    """
    Set the generator to a state that `get_rng_state` returned.

    ```python
    state = tc.get_rng_state()
    drawn = tc.randn(3)
    tc.set_rng_state(state)
    assert tc.randn(3).tolist() == drawn.tolist()
    ```
    """

def set_w8a8(enabled: bool) -> None:
    """
    Choose whether linear layers with int8 or fp8 weights multiply codes instead of values. GPUs multiply 8-bit numbers
    up to four times as fast as bf16, but the rounding of the other factor takes time.

    Right before a product, activations and gradients are rounded to the format of the weight. The scale of each row is
    the row's largest magnitude, divided by 127 (int8) or 448 (fp8), as in torchao's dynamic quantization. If a product
    sums over the rows of the weight, the rows' scales are multiplied into the gradient before it is rounded. Sums of
    int8 products are exact; those of fp8 products are in f32. Layers with other formats, and layers whose numbers of
    features are not multiples of 16, multiply values. Codes need a GPU of compute capability 7.5 for int8 and 8.9 for
    fp8; older GPUs multiply values.

    Args:
        enabled: whether layers multiply codes from now on. By default they multiply the values that codes represent.
            Captured graphs keep the choice with which they were recorded.
    """

def share_streamed(
    rank: SupportsIndex = 0, exchange: Callable[..., Any] | None = None, peers: bool = False
) -> None:
    """
    Share the streamed weights of the models that this thread loads from now on: the processes of a machine keep one
    copy of these weights. All processes must then load the same models in the same order.

    Args:
        rank: the number of this process, from 0.
        exchange: sends bytes to all processes and returns those of all, by rank; None ends the sharing.
        peers: keep the copy in slices on the devices of the processes instead of in host memory.

    Raises:
        ArgumentError: if `exchange` returns too few messages, or with `peers` a process is alone on its machine.
    """

def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    beta: SupportsFloat | SupportsIndex = ...,
) -> Tensor:
    """
    torch's `smooth_l1_loss` (Girshick 2015, arXiv:1504.08083): the Huber loss divided by its threshold.

    ```python
    loss = F.smooth_l1_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]))
    each = F.smooth_l1_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]), reduction="none")
    assert loss.item() == each.mean().item()
    ```

    Args:
        input: any shape.
        target: the same shape.
        reduction: "mean", "sum", or "none" for the losses of the elements.
        beta: the difference from which the loss is linear, at least 0; with 0 the loss is the absolute error.

    Raises:
        ShapeError, DTypeError: if the operands do not fit.
        ArgumentError: if the reduction is unknown or `beta` is negative.
    """

def snapshot(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """
    Copy tensors to the CPU, to write them while training continues. Later changes of variables do not affect the
    copies.

    ```python
    v = tc.Var([1.0])
    copy = tc.snapshot({"v": v})
    v.set(tc.tensor([2.0]))
    assert copy["v"].tolist() == [1.0]
    ```

    Args:
        tensors: tensors or variables by name.

    Returns:
        The copies by name.

    Raises:
        OutOfMemoryError: if the copies do not fit into memory.
    """

def stack(tensors: SupportsGetItem[int, Tensor], dim: SupportsIndex = 0) -> Tensor:
    """
    Stack tensors of one shape along a new dimension `dim`.

    ```python
    assert tc.stack([tc.zeros(3), tc.ones(3)]).shape == (2, 3)
    ```

    Raises:
        ArgumentError: if there are no tensors.
        ShapeError: if the shapes differ.
        DTypeError: if the dtypes differ.
        IndexOutOfRangeError: if the dimension is out of range.
    """

def stream_seed(seed: SupportsIndex, purpose: str, number: SupportsIndex) -> int:
    """
    The seed of one stream of random numbers. A run has a separate stream for each pair of `purpose` and `number`.

    Args:
        seed: the seed of the run, 0 to 2**64 - 1.
        purpose: the name of the random numbers' purpose.
        number: the index of the sample, batch or other item that the stream belongs to, 0 to 2**64 - 1.

    Raises:
        ArgumentError: if no purpose has this name.
    """

def swiglu(input: Tensor) -> Tensor:
    """
    `h * silu(gate)`, where h is the first half of the last dimension and gate the second (Shazeer 2020, arXiv:2002.05202).

    ```python
    assert F.swiglu(tc.randn(2, 8)).shape == (2, 4)
    ```

    Args:
        input: (..., 2 * n).

    Returns:
        (..., n).

    Raises:
        ShapeError: if the last dimension is odd.
        DTypeError: if the input is not floating point.
    """

def tensor(data: Any, dtype: DType | str | None = None, device: str = "cpu") -> Tensor:
    """
    A tensor with a copy of `data`.

    Args:
        data: a number, nested lists of numbers, a numpy array, or anything with `__dlpack__` or `__array__`.
        dtype: the dtype. By default, an array keeps its dtype, except that int8, int16 and int32 become i64, uint16
            becomes u32, and bool becomes u8. Python floats become f32, Python integers i64, Python bools u8.
        device: the device.

    Raises:
        DTypeError: if the data are not numbers, or no dtype can represent them (complex, uint64).
        ShapeError: if nested lists are ragged.
        DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
    """

def upsample_nearest2d(
    input: Tensor,
    size: SupportsIndex | Sequence[SupportsIndex] | None = None,
    scale_factor: SupportsIndex | Sequence[SupportsIndex] | None = None,
    *,
    channels_last: bool = False,
) -> Tensor:
    """
    Resize images as torch's `interpolate(mode="nearest")` does. Along a side that grows from m to n pixels, pixel i of the result is a
    copy of pixel floor(i * m / n) of the input.

    ```python
    image = tc.tensor([[[[1.0, 2.0]]]])
    assert F.upsample_nearest2d(image, scale_factor=2).tolist() == [[[[1.0, 1.0, 2.0, 2.0]] * 2]]
    ```

    Args:
        input: (B, C, H, W).
        size: size of the result in pixels: one number or (height, width).
        scale_factor: size of the result divided by the size of the input, an alternative to `size`: one number or (height, width).
        channels_last: whether the layout of input and result is (B, H, W, C). This layout needs no copies.

    Returns:
        (B, C, *size); (B, *size, C) with `channels_last`.

    Raises:
        ArgumentError: unless exactly one of `size` and `scale_factor` is given.
        ShapeError: if the input does not have four dimensions, or has no pixels.
        DTypeError: if the input is not floating point.
    """

def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    window: SupportsIndex | None = None,
    scale: SupportsFloat | SupportsIndex | None = ...,
) -> Tensor:
    """
    Causal attention inside the segments of a packed row. A packed row is several sequences, the segments, one after another. The result
    for a query is softmax(query @ key.T * scale) @ value over the keys of the query's segment, up to the position of the query. On CUDA
    the host does not read `cu_seqlens`, so a recorded CUDA graph can be replayed with other values in it.

    ```python
    q, k, v = (tc.randn(10, 2, 8) for _ in range(3))
    y = F.varlen_attention(q, k, v, tc.tensor([0, 4, 10]))  # texts of 4 and 6 tokens
    assert y.shape == (10, 2, 8)
    ```

    Args:
        query: (N, heads, D).
        key: (N, key_heads, D). `heads` must be a multiple of `key_heads`; head h of the query attends to key head
            h // (heads // key_heads).
        value: (N, key_heads, D).
        cu_seqlens: (M + 1,), i64 or u32, ascending: 0, then the end of each of M segments. The last end may be repeated, so that
            a tensor of fixed size can hold fewer segments. Rows after the last end belong to no segment: their results are zeros, and
            they get no gradient.
        window: the largest number of keys that a query attends to, including the key at its own position. This is the sliding window of
            Mistral (Jiang et al. 2023, arXiv:2310.06825). Default: no limit.
        scale: factor of the scores; default 1 / sqrt(D).

    Returns:
        (N, heads, D).

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
        IndexOutOfRangeError: if `cu_seqlens` does not ascend from 0 to at most N. On CUDA, the next call that reads a value raises this.
        ArgumentError: if the window is below 1.
    """

def verify_adapter(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    model: str = "sdxl",
    weights: str | bytes | PathLike[str] | PathLike[bytes] | None = None,
) -> AdapterReport:
    """
    Match an adapter file with a model's layers as ComfyUI, diffusers and other tools do.

    ```python
    report = tc.verify_adapter("adapter.safetensors", "sdxl", weights="sdxl")
    assert report.good  # ComfyUI applies all of it
    ```

    Args:
        path: the file.
        model: the family, such as "sdxl", "sd3" or "flux".
        weights: the model's files, if its sizes differ from the published ones; only their headers are read.

    Raises:
        MissingFileError, WeightsFormatError: if there is no such file, or it is not a safetensors file.
        ConfigError: if the model is not known.
    """

def where(condition: Tensor, input: Tensor | float | int, other: Tensor | float | int) -> Tensor:
    """
    Select elements of `input` where `condition` is not 0, and of `other` elsewhere. Shapes broadcast as in numpy.

    ```python
    x = tc.tensor([-1.0, 2.0])
    assert tc.where(x > 0, x, 0.0).tolist() == [0.0, 2.0]
    ```

    Args:
        condition: a u8 tensor, such as the result of a comparison.
        input: a tensor or a number.
        other: a tensor or a number. If both are numbers, the result is f32.

    Raises:
        DTypeError: if the condition is not u8, or `input` and `other` differ in dtype.
        ShapeError: if the shapes do not broadcast.
    """

def zeros(
    *shape: int | tuple[int, ...] | list[int], dtype: DType | str | None = None, device: str = "cpu"
) -> Tensor:
    """
    Zeros.

    Args:
        shape: the sizes, as arguments or one sequence.
        dtype: the dtype; default f32.
        device: the device.

    Raises:
        OutOfMemoryError: if the tensor does not fit into memory.
    """

def zeros_like(
    input: Tensor, dtype: DType | str | None = None, device: str | None = None
) -> Tensor:
    """
    Zeros in the shape of `input`, by default with its dtype and on its device.

    ```python
    x = tc.tensor([1, 2, 3])
    assert tc.zeros_like(x, dtype="f32").shape == x.shape
    ```
    """
