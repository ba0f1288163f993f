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
    "cuda_pinnable_bytes",
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
Version of the package. A build with CUDA has the suffix `+cu13`.
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
        bias: the layer's frozen bias, (out_features,), or None.
        rank: rank of the low-rank product, at least 1.
        alpha: the low-rank product is multiplied by alpha / rank. For "oft", which has no such product, alpha / rank
            multiplies the difference between the rotation and the identity.
        dropout: probability of dropping an element of the adapter's input while training, in [0, 1). "oft" drops
            nothing.
        rslora: whether the low-rank product is multiplied by alpha / sqrt(rank) instead of alpha / rank.
        qat: the format to which every forward pass rounds the adapted weight, as `nn.functional.fake_quantize` does.
        qat_activations: whether `forward` also rounds its input, with a scale for each vector of in_features.

    Raises:
        ArgumentError: if the kind or the format `qat` is unknown, or a number is out of range.
        ShapeError: if the weight is not a matrix or the bias does not fit it.
        ConfigError: if the weight cannot be rounded to the format `qat`, if `qat` is given with dropout, if
            `qat_activations` is True and `qat` is neither "int8" nor "fp8", or if an adapter of this kind does not suit
            the layer.
    """
    def __new__(
        cls,
        /,
        kind: str,
        weight: Tensor,
        bias: Tensor | None,
        rank: SupportsIndex,
        alpha: SupportsFloat | SupportsIndex,
        dropout: SupportsFloat | SupportsIndex = 0.0,
        rslora: bool = False,
        qat: str | None = None,
        qat_activations: bool = False,
    ) -> Adapter: ...
    def forward(self, /, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """
        Compute the layer's result with the adapter: (..., in_features) -> (..., out_features). `weight` and `bias` are
        the layer's: the adapter does not keep them.

        Raises:
            ShapeError, DTypeError, DeviceError: if the operands do not fit.
        """
    def merged_weight(self, /, weight: Tensor) -> Tensor:
        """
        Return the merged weight, in the dtype of `weight`, the layer's frozen weight. A plain linear layer with the
        merged weight and the same bias computes the same results as the layer with the adapter, unless the adapter
        applies dropout or rounds its input.
        """
    @property
    def scale(self, /) -> float:
        """
        The number by which the low-rank product is multiplied: alpha / rank, or alpha / sqrt(rank) with `rslora`.
        """
    def set_training(self, /, training: bool) -> None:
        """
        Set whether the adapter is in training mode, in which dropout is active.
        """
    def vars(self, /) -> list[Var]:
        """
        Return the adapter's trainable parameters. They depend on its kind: LoRA has down and up, in this order; DoRA
        has down, up and the magnitude.
        """

@final
class AdapterFile:
    """
    The contents of an adapter file that is not written yet, made by `prepare_adapters`.

    ```python
    unet = tc.models.load("sdxl")
    adapter = unet.add_adapter(tc.LoraConfig(r=4, target_modules=["to_q", "to_v"]))
    file = tc.prepare_adapters("lora.safetensors", [adapter])
    assert file.idle  # no adapter is trained yet, so none has an effect
    file.write()
    ```
    """
    def __repr__(self, /) -> str: ...
    @property
    def idle(self, /) -> list[str]:
        """
        The names of layers whose adapter has no effect, as in `AdapterSet.save`.
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
    The report on one module of an adapter file. A module consists of the tensors whose keys start with the same name,
    such as the two factors of a LoRA. A module may adapt several layers that other tools hold as one matrix; then each
    of these layers has its own report.

    ```python
    report = tc.verify_adapter("adapter.safetensors", "sdxl", weights="sdxl")
    module = report.modules[0]
    assert (module.kind, module.rank, module.fault) == ("lora", 4, None)
    ```
    """
    @property
    def alpha(self, /) -> float | None:
        """
        The value of the module's tensor `alpha`, the numerator of the scale; None if the module has no such tensor.
        """
    @property
    def changed_by(self, /) -> dict[str, str]:
        """
        The tools that apply the module, but not as it was trained: a dict of names and reasons.
        """
    @property
    def fault(self, /) -> str | None:
        """
        A message about wrong shapes, missing parameters or non-finite elements; None if there is no such fault.
        """
    @property
    def ignored_by(self, /) -> dict[str, str]:
        """
        The tools that ignore the module: a dict of names and reasons.
        """
    @property
    def kind(self, /) -> str | None:
        """
        The kind of adapter; None if the parameters form no complete adapter.
        """
    @property
    def layer(self, /) -> str | None:
        """
        The name of the adapted layer, after the part's name in diffusers (such as "unet."); None if the model has no
        such layer.
        """
    @property
    def module(self, /) -> str:
        """
        The module's name in the file: the part of its tensors' keys before the name of the parameter.
        """
    @property
    def rank(self, /) -> int:
        """
        The adapter's rank; 0 if it has no low-rank factors.
        """
    @property
    def scale(self, /) -> float:
        """
        The scale by which the adapter is multiplied: `alpha / rank`. If `alpha` is None, the scale is taken from peft's
        configuration. The scale is 1 if that is missing too, or if `rank` is 0.
        """
    @property
    def zero(self, /) -> bool:
        """
        Whether all elements of a factor are 0, so that the adapter has no effect.
        """

@final
class AdapterReport:
    """
    The report on an adapter file: how other tools would apply the file.

    ```python
    report = tc.verify_adapter("adapter.safetensors", "sdxl", weights="sdxl")
    assert report.good and "ComfyUI" in report.tools
    ```
    """
    @property
    def good(self, /) -> bool:
        """
        Whether the file has modules, `others` is empty, every module has a layer, an effect and no fault, and the tool
        `tools[0]`, if there is one, applies every module as it was trained. The rest of `tools` does not count.
        """
    @property
    def modules(self, /) -> list[AdapterModule]:
        """
        The reports of all modules, in the order of the modules' names.
        """
    @property
    def others(self, /) -> list[str]:
        """
        The keys of the file's tensors that are not parameters of an adapter.
        """
    @property
    def remarks(self, /) -> list[str]:
        """
        Remarks about the file as a whole.
        """
    @property
    def tools(self, /) -> list[str]:
        """
        The names of the tools that the report covers. The first is ComfyUI for image models, and peft for language
        models; the demo's model has no tools.
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
        The configuration of the adapters.
        """
    def load(self, /, path: str | bytes | PathLike[str] | PathLike[bytes]) -> None:
        """
        Set the parameters to those of an adapter file. The file must have the same layers, kinds, ranks and alphas as
        these adapters.

        Raises:
            MissingFileError: if there is no such file.
            WeightsFormatError: if the file is damaged, or has no adapter for this model.
            ConfigError, ShapeError: if the file does not fit these adapters. In this case no parameter changes, unless
                only the file's learned scales of `qat` are wrong.
        """
    def named_parameters(self, /) -> dict[str, Var]:
        """
        Return the trainable parameters under peft's names ("transformer_blocks.0.attn.to_q.lora_A.weight").
        """
    def parameters(self, /) -> list[Var]:
        """
        Return the trainable parameters in the order of the layers.
        """
    def save(
        self,
        /,
        path: str | bytes | PathLike[str] | PathLike[bytes],
        format: str | None = None,
        metadata: dict[str, str] | None = None,
        dtype: DType | str | None = None,
    ) -> list[str]:
        """
        Write the adapters to a safetensors file. If writing fails, no incomplete file remains.

        Args:
            path: the file. With the format "peft", a path that does not end in ".safetensors" is a folder, which gets
                the files that `PeftModel.from_pretrained` loads.
            format: "kohya", "diffusers", "peft" or "comfyui". Default: the format that most tools load for this model,
                such as "kohya" for SDXL; "peft" for a model that no other tool supports.
            metadata: entries (name: text) for the file's header, in addition to the entries that other tools read.
            dtype: the dtype of the parameters in the file, "f32", "f16" or "bf16". Default: f32.

        Returns:
            The names of layers whose adapter has no effect because one of its matrices is zero everywhere, as before
            training.

        Raises:
            FileError: if the file cannot be written.
            ArgumentError: if the format is unknown or cannot hold these adapters, if the dtype is not floating point,
                or if `path` is a folder and the format is not "peft".
        """
    def set_enabled(self, /, enabled: bool) -> None:
        """
        Enable or disable the adapters. While they are disabled, the model computes exactly the results of its frozen
        weights.
        """
    def set_training(self, /, training: bool) -> None:
        """
        Set whether the adapters are in training mode, in which dropout is active.
        """

@final
class AutoencoderKL(Model):
    """
    The autoencoder of latent diffusion, which converts images to latents and back. It has the results and the parameter
    names of diffusers' `AutoencoderKL`. `from_pretrained` loads one.

    ```python
    vae = tc.models.AutoencoderKL.from_pretrained("sdxl", subfolder="vae")
    mean, logvar = vae.encode(tc.zeros(1, 3, 64, 64))
    images = vae.decode(mean)
    assert images.shape == (1, 3, 64, 64)
    ```
    """
    def decode(self, /, latent: Tensor, *, tile_size: SupportsIndex | None = None) -> Tensor:
        """
        Decode latents to images.

        Args:
            latent: latents, (B, C, h, w), before shift and scaling, as `encode` returns them. C is the model's number
                of latent channels.
            tile_size: the side of a tile in pixels, rounded down to a multiple of `downscale`; 512 is usual. Images
                with a longer side are decoded in square tiles, which overlap by a quarter of their side and are blended
                at their seams. The memory of the activations then does not grow with the image. Default: no tiles.

        Returns:
            Images, (B, 3, h * downscale, w * downscale), values about -1 to 1.

        Raises:
            ShapeError: if the latents do not fit the model.
            ArgumentError: if `tile_size` is below 4 * downscale.
        """
    @property
    def downscale(self, /) -> int:
        """
        The number of pixels per latent along each side of an image.
        """
    def encode(
        self, /, image: Tensor, *, tile_size: SupportsIndex | None = None
    ) -> tuple[Tensor, Tensor]:
        """
        Encode images: return the distribution of their latents.

        Args:
            image: images, (B, 3, H, W), values -1 to 1.
            tile_size: the side of a tile in pixels, rounded down to a multiple of `downscale`; 512 is usual. Images
                with a longer side are encoded in square tiles, which overlap by a quarter of their side. Near the
                tiles' seams, the result differs a little from that of the whole image. Default: no tiles.

        Returns:
            The mean and the logarithm of the variance of the latents before shift and scaling, (B, C, H / downscale,
            W / downscale) each, sizes rounded down. C is the model's number of latent channels, 4 for SDXL.

        Raises:
            ShapeError: if the image does not fit the model, or a side is shorter than `downscale`.
            ArgumentError: if `tile_size` is below 4 * downscale.
        """
    @property
    def scaling_factor(self, /) -> float:
        """
        The factor of the latents: a diffusion model's input is (latent - shift_factor) * scaling_factor.
        """
    @property
    def shift_factor(self, /) -> float:
        """
        The shift of the latents (see `scaling_factor`); 0 for SDXL.
        """

@final
class AutoencoderKLQwenImage(Model):
    """
    Qwen-Image's autoencoder between images and latents. It has the parameter names of diffusers'
    `AutoencoderKLQwenImage` and computes the results of that class for videos of one frame. The layers of the published
    model that change the number of frames are neither loaded nor saved. `from_pretrained` loads an autoencoder.
    """
    def decode(self, /, latent: Tensor, *, tile_size: SupportsIndex | None = None) -> Tensor:
        """
        Decode latents to images.

        Args:
            latent: latents, (B, 16, h, w), before normalisation, as `encode` returns them.
            tile_size: the side of a tile in pixels, rounded down to a multiple of `downscale`; 512 is usual. Images
                with a longer side are decoded in square tiles, which overlap by a quarter of their side and are blended
                at their seams. The memory of the activations then does not grow with the image. Default: no tiles.

        Returns:
            Images, (B, 3, h * downscale, w * downscale), values -1 to 1.

        Raises:
            ShapeError: if the latents do not fit the model.
            ArgumentError: if `tile_size` is below 4 * downscale.
        """
    @property
    def downscale(self, /) -> int:
        """
        The number of pixels per latent along each side of an image.
        """
    def encode(
        self, /, image: Tensor, *, tile_size: SupportsIndex | None = None
    ) -> tuple[Tensor, Tensor]:
        """
        Encode images: return the distribution of their latents.

        Args:
            image: images, (B, 3, H, W), values -1 to 1.
            tile_size: the side of a tile in pixels, rounded down to a multiple of `downscale`; 512 is usual. Images
                with a longer side are encoded in square tiles, which overlap by a quarter of their side. Near the
                tiles' seams, the result differs a little from that of the whole image. Default: no tiles.

        Returns:
            The mean and the logarithm of the variance of the latents before normalisation with `latents_mean` and
            `latents_std`, (B, 16, H / downscale, W / downscale) each, sizes rounded down.

        Raises:
            ShapeError: if the image does not fit the model, or a side is shorter than `downscale`.
            ArgumentError: if `tile_size` is below 4 * downscale.
        """
    @property
    def latents_mean(self, /) -> list[float]:
        """
        The mean of each latent channel. The diffusion transformer's input is (latent - latents_mean) / latents_std.
        """
    @property
    def latents_std(self, /) -> list[float]:
        """
        The standard deviation of each latent channel.
        """

@final
class CLIPTextModel(Model):
    """
    CLIP's text encoder. It computes the results of transformers' `CLIPTextModel` or `CLIPTextModelWithProjection`. The
    names of its parameters, except the projection's, begin with "text_model.", as in the published files.
    `from_pretrained` loads an encoder.

    ```python
    encoder = tc.models.CLIPTextModel.from_pretrained("sdxl", subfolder="text_encoder")
    features = encoder(tc.tensor([[1, 2, 3]]))
    assert features.penultimate.shape[:2] == (1, 3)
    ```
    """
    def __call__(self, /, input_ids: Tensor) -> TextFeatures:
        """
        Compute the features of B texts of S tokens each.

        Args:
            input_ids: token ids, (B, S), i64 or u32. S is at most the model's number of positions, 77 in the published
                models.

        Raises:
            ShapeError: if the ids have another shape, or the texts have no token or too many.
            IndexOutOfRangeError: if an id is not a token.
            DTypeError: if the ids are neither i64 nor u32.
        """

@final
class CapturedFunction:
    """
    A function of tensors that returns a list of tensors. After its first calls, it is recorded as a CUDA graph, which
    later calls replay.
    """
    def __call__(self, /, inputs: SupportsGetItem[int, Tensor]) -> list[Tensor]:
        """
        Call the function, record it or replay its graph, and return the results for `inputs`.

        Raises:
            ArgumentError: if there are more or fewer inputs than `static_inputs`.
            ShapeError, DTypeError: if an input has another shape or dtype than in `static_inputs`.
            DeviceError: if the function does something that graphs do not support, such as reading a value, if it
                returns a tensor on the CPU, or if another call of this object has not returned yet.
            The exceptions of the function.
        """
    def __new__(
        cls, /, function: Callable[..., Any], static_inputs: SupportsGetItem[int, Tensor]
    ) -> CapturedFunction:
        """
        Prepare a function. It is not called yet.

        Args:
            function: a function that takes as many tensors as `static_inputs` has, and returns a list of tensors.
            static_inputs: tensors with the shapes and dtypes that the inputs of every call must have. The graph runs on
                the first CUDA device of these tensors, or on "cuda" if all are on the CPU.

        Raises:
            CudaUnavailableError: if CUDA cannot be used.
            DeviceError: if the GPU cannot run graphs, or this thread is recording a function.
            AutogradError: if one of `static_inputs` needs a gradient.
            OutOfMemoryError: if copies of the inputs do not fit into memory.
        """
    @property
    def is_recorded(self, /) -> bool:
        """
        Whether the function has been recorded, so that calls replay its graph.
        """

@final
class CausalLM(Model):
    """
    A language model of the family Llama 2 or 3, Mistral, SmolLM2, Qwen2, Qwen2.5 or Qwen3. It computes the results of
    transformers' `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM` or `Qwen3ForCausalLM`. `from_pretrained`
    loads a model. With `layers=` it loads only the first layers, for use as a text encoder. It loads Qwen2.5-VL as a
    text encoder, too. A text encoder has no language-model head, so it computes hidden states, but no scores.

    The constructor makes a fresh model with the sizes in a `config.json`. The model's parameters are trainable and f32.

    In shapes, V is the size of the vocabulary, and D is the number of features of a hidden state. A batch has B texts
    of S tokens each, padding included. Some methods take M texts as one packed row of N tokens instead. It consists of
    three tensors: `input_ids` has the tokens, one text after the other. `positions` has each token's position in its
    text, from 0. `cu_seqlens` has M + 1 ascending bounds, from 0 to at most N: text i has the tokens from bound i up
    to, but not including, bound i + 1. Tokens of a text do not attend to other texts. The tokens from the last bound on
    are padding.

    ```python
    lm = tc.models.CausalLM.from_pretrained("llama")
    tokens = [257, *b"upper: clavo", 256, 258]  # the token "user", the bytes of the text, the tokens "end", "assistant"
    (answer,) = lm.generate([tokens], max_new_tokens=8)
    ```

    Args:
        config: the path of the `config.json`.
        device: the device of the parameters.

    Raises:
        MissingFileError, ConfigError: if the configuration is missing or belongs to another model.
        DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
        OutOfMemoryError: if the parameters do not fit.
    """
    def __call__(self, /, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """
        Compute, for each token of `input_ids`, the scores (logits) of the token that follows it: (B, S, V) in the dtype
        of the weights.

        Args:
            input_ids: token ids, (B, S), i64 or u32.
            attention_mask: (B, S), i64 or u32: 1 for tokens of the text, 0 for padding, where the scores are 0.
                Default: no padding.

        Raises:
            ShapeError: if an input has another shape.
            IndexOutOfRangeError: if an id is not a token, or the mask has other values than 0 and 1.
            DTypeError: if an input has another dtype than i64 or u32.
            ArgumentError: if the model is a text encoder.
        """
    def __new__(
        cls, /, config: str | bytes | PathLike[str] | PathLike[bytes], device: str = "cpu"
    ) -> CausalLM: ...
    @property
    def eos_token_ids(self, /) -> list[int]:
        """
        The tokens that end a text: those of `config.json`, and for a loaded model also those of
        `generation_config.json`.
        """
    def extend(
        self, /, cache: KVCache, tokens: SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]]
    ) -> Tensor:
        """
        Add tokens to the texts of a cache, and compute the scores of the next token of each text that got tokens. The
        result has one row of V scores for each of these texts, in the order of the cache, and no gradient.

        The scores equal those of a forward pass over the whole texts. For a text that grows by one token, the model
        usually computes only this token; otherwise it computes all tokens of the text again.

        Args:
            cache: the cache with the texts.
            tokens: the new token ids of each text; an empty list for a text that gets none.

        Raises:
            IndexOutOfRangeError: if an id is not a token.
            ArgumentError: if the number of lists in `tokens` is not the number of texts in the cache, if no text gets a
                token, or if the model is a text encoder.
        """
    def generate(
        self,
        /,
        prompts: SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]],
        *,
        max_new_tokens: SupportsIndex = 128,
        temperature: SupportsFloat | SupportsIndex = 0.0,
        top_k: SupportsIndex = 0,
        top_p: SupportsFloat | SupportsIndex = 1.0,
        min_p: SupportsFloat | SupportsIndex = 0.0,
        repetition_penalty: SupportsFloat | SupportsIndex = 1.0,
        stop_token_ids: SupportsGetItem[int, SupportsIndex] | None = None,
        seed: SupportsIndex = 0,
    ) -> list[list[int]]:
        """
        Generate tokens after each prompt. Returns one list of new tokens for each prompt, without the token that ends
        the text.

        Texts do not influence each other and are not padded; their attention keys and values are cached. A drawn token
        depends only on the scores, the sampling options, the seed, the index of the text and the token's position in
        the text.

        Args:
            prompts: the token ids with which each text begins; every text needs at least one.
            max_new_tokens: the largest number of tokens that are added to each text.
            temperature: a number of at least 0. 0 always chooses the most likely token; otherwise scores are divided by
                the temperature and a token is drawn.
            top_k: draw only from the `top_k` most likely tokens; 0 draws from all.
            top_p: draw only from the smallest set of most likely tokens whose probabilities sum to at least this
                number, above 0 and up to 1.
            min_p: draw only from tokens whose probability is at least `min_p` · the probability of the most likely
                token; 0 to 1.
            repetition_penalty: a number above 0. Numbers above 1 make tokens that are already in the text less likely.
            stop_token_ids: the tokens that end a text; default: `eos_token_ids`.
            seed: the seed of the random draws.

        Raises:
            IndexOutOfRangeError: if an id is not a token.
            ArgumentError: if a prompt is empty, if a number is out of range, or if the model is a text encoder.
            NonFiniteError: if one of the model's scores is NaN.
        """
    def hidden(self, /, input_ids: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Tensor:
        """
        Compute the hidden states of a packed row after the final norm, (N, D). The language-model head computes the
        scores from these states (see `logits`).

        Args:
            input_ids: token ids, (N,), i64 or u32.
            positions: the position of each token in its text, (N,), i64 or u32.
            cu_seqlens: the bounds of the texts, (M + 1,), i64 or u32.

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
        Compute the hidden states with the numbers `layers`. As in transformers, states 0 are the embedded tokens, and
        states n are the results of the first n layers. Unlike in transformers, the final norm is not applied to the
        last layer's states. Layers whose states are not needed are not computed.

        Args:
            input_ids: token ids, (B, S), i64 or u32.
            attention_mask: (B, S), i64 or u32: 1 for tokens of the text, 0 for padding, where the states are 0.
                Default: no padding.
            layers: the numbers of the states to return, from 0 to the number of layers that were loaded; default: the
                last layer's.

        Returns:
            (B, S, D) for each of `layers`.

        Raises:
            ShapeError, DTypeError: if an input does not fit.
            IndexOutOfRangeError: if an id is not a token, or the mask has other values than 0 and 1.
            ArgumentError: if a number in `layers` is negative or exceeds the number of layers that were loaded.
        """
    def log_probs(
        self, /, input_ids: Tensor, targets: Tensor, positions: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        """
        Compute the logarithm of the probability of each target of a packed row: (N,) in f32, 0 where the target is
        -100. Neither the forward nor the backward pass holds the matrix of the scores of all tokens in memory.

        Args:
            input_ids, targets, positions, cu_seqlens: as for `packed_loss`.

        Raises:
            The errors of `packed_loss` about these arguments and the model.
        """
    def logits(self, /, hidden: Tensor) -> Tensor:
        """
        Compute the scores (logits) of the next token, (..., V), from the hidden states (..., D) that `hidden` computed.

        Raises:
            ShapeError, DTypeError: if the last dimension of the states is not D, or their dtype is not that of the
                weights.
            ArgumentError: if the model is a text encoder.
        """
    def loss(
        self, /, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """
        Compute the mean cross entropy of predicting each label from the tokens before it: a scalar in f32. The matrix
        of the scores of all tokens never exists in memory.

        Args:
            input_ids: token ids, (B, S), i64 or u32.
            labels: (B, S), i64: a copy of `input_ids`, with -100 at the tokens to ignore. The label in column s is
                predicted from the tokens up to column s - 1, so labels in the first column and labels that directly
                follow padding are ignored too. The mean is over the labels that are not ignored; if there are none, it
                is 0.
            attention_mask: (B, S), i64 or u32: 1 for tokens of the text, 0 for padding. Default: no padding.

        Raises:
            ShapeError, DTypeError: if an input does not fit.
            IndexOutOfRangeError: if an id or a label is not a token, or the mask has other values than 0 and 1.
            ArgumentError: if the model is a text encoder.
        """
    @property
    def max_position_embeddings(self, /) -> int:
        """
        The largest number of tokens of a text that the model was trained for.
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
        Compute the weighted sum of the cross entropies of a packed row's targets: a scalar in f32. The matrix of the
        scores of all tokens never exists in memory.

        Args:
            input_ids: token ids, (N,), i64 or u32.
            targets: the target of each token, (N,), i64: the id of the next token in the same text, or -100 to leave
                the token out of the sum.
            positions: the position of each token in its text, (N,), i64 or u32.
            cu_seqlens: the bounds of the texts, (M + 1,), i64 or u32.
            weights: the factor of each token's cross entropy, (N,), f32; default: 1 for all tokens.

        Raises:
            ShapeError, DTypeError: if an input does not fit.
            IndexOutOfRangeError: if an id or a target is not a token, or a bound is out of order or range.
            ArgumentError: if the model is a text encoder.
            NoBackwardError: if `weights` needs a gradient.
        """
    def padded_states(
        self,
        /,
        input_ids: Tensor,
        text_tokens: SupportsIndex,
        layers: SupportsGetItem[int, SupportsIndex],
    ) -> list[Tensor]:
        """
        Compute the hidden states, as in `hidden_states`, of one text and the padding that follows it. Padding tokens
        attend to all tokens of the text, but not to padding tokens, as in transformers with an attention mask.

        Args:
            input_ids: token ids, (N,), i64 or u32.
            text_tokens: the number of tokens of the text, 1 to N. The first `text_tokens` tokens of `input_ids` are the
                text; all later tokens are padding.
            layers: the numbers of the states to return, as in `hidden_states`.

        Returns:
            (N, D) for each of `layers`.

        Raises:
            ShapeError, DTypeError: if an input does not fit.
            IndexOutOfRangeError: if an id is not a token.
            ArgumentError: if `text_tokens` is not from 1 to N, or if a number in `layers` is negative or exceeds the
                number of layers that were loaded.
        """
    def stream(
        self,
        /,
        prompts: SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]],
        *,
        max_new_tokens: SupportsIndex = 128,
        temperature: SupportsFloat | SupportsIndex = 0.0,
        top_k: SupportsIndex = 0,
        top_p: SupportsFloat | SupportsIndex = 1.0,
        min_p: SupportsFloat | SupportsIndex = 0.0,
        repetition_penalty: SupportsFloat | SupportsIndex = 1.0,
        stop_token_ids: SupportsGetItem[int, SupportsIndex] | None = None,
        seed: SupportsIndex = 0,
    ) -> Generation:
        """
        Generate tokens as `generate` does, but return an iterator. Each item is a list with one element per text: the
        new token, or None if the text has ended.

        Args:
            prompts, max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop_token_ids, seed: as for
                `generate`.

        Raises:
            The errors of `generate`. The call itself raises ArgumentError if a prompt is empty or a number is out of
            range, and IndexOutOfRangeError if an id is 2**32 or more; the iterator raises the other errors.
        """
    @property
    def vocab_size(self, /) -> int:
        """
        The number of rows of the embedding. All token ids are below this number.
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
        Pixels per latent along one side of an image; None if there is no autoencoder.
        """
    @property
    def model(self, /) -> str | None:
        """
        The name of the models' family, as on the command line; None for a model that belongs to no family.
        """
    @property
    def parts(self, /) -> dict[str, PartFacts]:
        """
        The models, by the names of their folders in a pipeline. A model without a pipeline has an empty name.
        """
    @property
    def prediction_type(self, /) -> str | None:
        """
        What the denoiser predicts: "epsilon" or "v_prediction"; None if the files do not state it.
        """
    @property
    def resolution(self, /) -> int | None:
        """
        Side in pixels of the square images that the denoiser was trained on; None if it is unknown, or if there is no
        denoiser.
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
        Predict the velocity (noise minus latents) for noisy latents.

        Args:
            hidden_states: noisy latents of B samples as S tokens each, (B, S, in_channels). The features of a token are
                the values of a square of 2 x 2 latents in the order (channel, row, column).
            encoder_hidden_states: T5's results for the L text tokens, (B, L, joint_attention_dim).
            timestep: the time from 0 (clean latents) to 1 (pure noise): (B,), (1,), or a number.
            img_ids: positions of the image tokens, (S, 3): 0, row, column.
            txt_ids: positions of the text tokens, (L, 3): zeros.
            lengths: for each sample, the number of text tokens that other tokens attend to, (B,), at least 1: the
                text's own tokens and one padding token. With `lengths`, L is at most 4096. Default: all L tokens; then
                attention needs no mask, which saves time.

        Returns:
            A tensor of the shape of `hidden_states`, in the dtype of the weights.

        Raises:
            ShapeError: if the inputs do not fit the model or one another.
            DTypeError: if `hidden_states` is not floating point, or `img_ids` and `txt_ids` have different dtypes.
        """

@final
class DType:
    """
    The type of a tensor's elements.

    A dtype is equal to each of its names: if `t.dtype == tc.bfloat16`, also `t.dtype == "bf16"` and
    `t.dtype == "bfloat16"`. A name works wherever a dtype is expected.

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
        Return the hash of the short name, so that `t.dtype` finds its entry in a dict such as `{"f32": ...}`.
        """
    def __new__(cls, /, name: DType | str) -> DType: ...
    def __reduce__(self, /) -> tuple[Any, ...]: ...
    def __repr__(self, /) -> str: ...
    def __str__(self, /) -> str: ...
    @property
    def is_floating_point(self, /) -> bool:
        """
        Whether this dtype is floating point. Only floating-point tensors can have gradients.
        """
    @property
    def itemsize(self, /) -> int:
        """
        The number of bytes of one element.
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
    prediction = tc.zeros(2, 4, 8, 8)  # a model computes it from noised.sample and noised.timesteps
    loss = objective.loss(prediction, noised)
    ```

    Args:
        schedule: the noise schedule of the model's training.
        timesteps: the distribution of timesteps: "uniform", "logit_normal" or "mode" (arXiv:2403.03206).
        logit_mean: for "logit_normal", the mean of the normal distribution; a positive mean favours noisy timesteps.
        logit_std: for "logit_normal", the standard deviation of the normal distribution, above 0.
        shift: a number above 1 shifts the timesteps towards noise, a number below 1 towards data; 1 changes nothing.
        min_timestep: the first timestep that may be drawn.
        max_timestep: the timestep after the last one that may be drawn; None means the number of timesteps of the
            schedule.
        min_snr_gamma: gamma of min-SNR weights (arXiv:2303.09556). The weight of a timestep in the loss is min(SNR,
            gamma) / SNR if the model predicts noise, and min(SNR, gamma) / (SNR + 1) if it predicts velocities. SNR is
            the timestep's signal-to-noise ratio. The paper uses 5; with None all timesteps have the weight 1.
        noise_offset: the standard deviation of additional noise that has one value for each channel of each example. 0
            adds none; up to about 0.1 is usual.
        multires_noise_iterations: the largest number of levels of multiresolution noise. The first level is normal
            noise of the size of the latents. Each further level has a lower resolution and is enlarged to that size.
            All levels are added to the noise of the latents, and the sum is scaled to a standard deviation of 1 over
            the example. 0 adds no levels; 6 to 10 are usual. Levels need latents (B, C, H, W).
        multires_noise_discount: the weight of each level after the first, divided by the weight of the level before it;
            above 0 and below 1.
        loss: the loss of an element: "mse", "l1", "huber" (torch's huber_loss) or "smooth_l1" (the Huber loss divided
            by delta).
        huber_delta: delta of the losses "huber" and "smooth_l1", above 0, and at most 1 unless `huber_schedule` is
            "constant". These losses are linear for differences above delta.
        huber_schedule: the delta of timestep t of the schedule's T timesteps (arXiv:2403.16728), where d is
            `huber_delta`: "constant" for d, "exponential" for d ** (t / T), "snr" for
            (1 - d) / (1 + sigma) ** 2 + d, where sigma is `schedule.sigmas[t]`.
        device: the device of the latents.

    Raises:
        ArgumentError: if a name is unknown, if a number is out of range, or if the model predicts noise and a timestep
            of pure noise may be drawn.
        DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
    """
    def __new__(
        cls,
        /,
        schedule: NoiseSchedule,
        *,
        timesteps: str = "uniform",
        logit_mean: SupportsFloat | SupportsIndex = 0.0,
        logit_std: SupportsFloat | SupportsIndex = 1.0,
        shift: SupportsFloat | SupportsIndex = 1.0,
        min_timestep: SupportsIndex = 0,
        max_timestep: SupportsIndex | None = None,
        min_snr_gamma: SupportsFloat | SupportsIndex | None = None,
        noise_offset: SupportsFloat | SupportsIndex = 0.0,
        multires_noise_iterations: SupportsIndex = 0,
        multires_noise_discount: SupportsFloat | SupportsIndex = 0.3,
        loss: str = "mse",
        huber_delta: SupportsFloat | SupportsIndex = 0.1,
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
        Compute the loss of a prediction. An example's loss is the mean of the losses of its elements, weighted by
        `mask` and multiplied by the example's min-SNR weight and its entry in `weights`. The result is the mean over
        the examples of the batch.

        Args:
            prediction: the model's output for `noised.sample` at `noised.timesteps`.
            noised: a result of `noise`, `noise_at` or `validation_noise`.
            mask: the weight of each spatial position of each example, at least 0. The shape is (B, 1, ...) with the
                spatial size of the latents. An example's mask is divided by its mean, so that the area of the mask does
                not change the weight of the example. An example whose mask is 0 everywhere has loss 0.
            weights: the weight of each example, (B,), such as the weight of the prior loss for regularisation images.

        Returns:
            A scalar in f32.

        Raises:
            ShapeError: if the shape of an argument does not fit `noised`.
            DeviceError: if the tensors are on different devices.
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
            samples: the sample number of each example; a training run numbers its samples from 0. If given, an
                example's noise and timestep depend only on its sample number and `seed`, and the library's generator
                does not advance. By default, noise and timesteps come from the library's generator.
            seed: the seed of the run; it has an effect only with `samples`.

        Raises:
            ShapeError: if the latents have fewer than two dimensions, or other than four for multiresolution noise, or
                if `samples` does not have one number for each example.
            DTypeError: if the latents are not floating point.
            DeviceError: if the latents are on another device than the objective.
            ArgumentError: if `seed` or a sample number is outside the range 0 to 2**64 - 1.
        """
    def noise_at(self, /, latents: Tensor, noise: Tensor, timesteps: Tensor) -> NoisedLatents:
        """
        Add given noise to latents at given timesteps.

        Args:
            latents: (B, C, ...).
            noise: in the shape of the latents.
            timesteps: (B,), i64 or u32.

        Raises:
            ShapeError: if the latents have fewer than two dimensions, or the three shapes do not fit together.
            DTypeError: if the latents are not floating point, or the timesteps are neither i64 nor u32.
            DeviceError: if a tensor is on another device than the objective.
            IndexOutOfRangeError: if the schedule does not have one of the timesteps.
        """
    def validation_noise(
        self,
        /,
        latents: Tensor,
        examples: SupportsGetItem[int, SupportsIndex],
        seed: SupportsIndex = 0,
    ) -> NoisedLatents:
        """
        Add noise to latents for a validation loss. With the same `seed`, an example has the same noise and timestep in
        every call and in any batch. The library's generator does not advance. The timesteps of examples with
        consecutive numbers are spread evenly over the whole range of timesteps.

        Args:
            latents: (B, C, ...).
            examples: the number of each example in the validation set, from 0.
            seed: the seed of the noise; the timesteps do not depend on it.

        Raises:
            ShapeError: if the latents have fewer than two dimensions, or if `examples` does not have one number for
                each example of the batch.
            DTypeError: if the latents are not floating point.
            DeviceError: if the latents are on another device than the objective.
            ArgumentError: if `seed` is outside the range 0 to 2**64 - 1, or a number in `examples` is outside the range
                0 to 2**32 - 1.
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
        sample_size: height and width of an image in pixels, a multiple of `patch_size`.
        patch_size: height and width in pixels of a patch; each patch becomes one token.
        num_layers: number of transformer blocks.
        num_attention_heads: number of attention heads of each block.
        attention_head_dim: width of each head; the width of the tokens is the number of heads times this width.
        mlp_ratio: width of the feed-forward network's hidden layer, as a multiple of the width of the tokens.
        num_classes: number of classes of images.
        device: the device of the parameters.

    Raises:
        ConfigError: if a number is 0 or above 65536, or `sample_size` is not a multiple of `patch_size`.
        ArgumentError: if a number is negative.
        DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
        OutOfMemoryError: if the parameters do not fit.
    """
    def __call__(self, /, sample: Tensor, timestep: Tensor, class_labels: Tensor) -> Tensor:
        """
        Predict the velocity of flow matching (noise minus image) for noisy images.

        Args:
            sample: noisy images, (B, 1, sample_size, sample_size). The values of images without noise are -1 to 1.
            timestep: the time of each image from 0 (clean image) to 1000 (pure noise), (B,).
            class_labels: the class of each image, (B,), i64 or u32.

        Returns:
            A tensor of the shape of `sample`, in the dtype of the weights.

        Raises:
            ShapeError: if the inputs do not fit the model or one another.
            IndexOutOfRangeError: if a label is not a class.
            DTypeError: if the labels are neither i64 nor u32.
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
    unet = tc.models.load("sdxl")
    adapter = unet.add_adapter(tc.LoraConfig(r=4, target_modules="all-attention"))
    ema = tc.optim.EMA(adapter, decay=0.99)
    ema.update()  # after each step of the optimizer
    with ema:
        adapter.save("averaged.safetensors")
    ```

    Args:
        adapter: the adapter, from `add_adapter` or `load_adapter`.
        decay: the weight of the old average in each update, in [0, 1).
        warmup: whether the update that follows n other updates uses min(decay, (1 + n) / (10 + n)) instead of `decay`,
            so that the initial values soon lose their weight.

    Raises:
        ArgumentError: if `decay` is out of range.
        DTypeError: if the parameters are not f32.
        OutOfMemoryError: if the averages do not fit.
    """
    def __enter__(self, /) -> EMA: ...
    def __exit__(self, /, *exception: object) -> None: ...
    def __new__(
        cls,
        /,
        adapter: AdapterSet,
        decay: SupportsFloat | SupportsIndex = 0.999,
        warmup: bool = True,
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
        Whether the averages currently replace the adapter's parameters.
        """
    def load_state_dict(self, /, state: dict[str, Tensor]) -> None:
        """
        Load a state that was saved for an adapter with the same shapes. After each of the following errors, nothing has
        changed.

        Raises:
            ConfigError: if an entry is missing or not expected, or the number of updates is negative.
            ShapeError, DTypeError: if an entry has another shape or dtype.
            DeviceError: inside a captured function.
        """
    def state_dict(self, /) -> dict[str, Tensor]:
        """
        Return a copy of the state on the CPU: `INDEX.average` is the average of the parameter with the index INDEX in
        `adapter.parameters()`, and `updates` (i64) is the number of updates.
        """
    def swap_in(self, /) -> None:
        """
        Replace the adapter's parameters by the averages.

        Raises:
            ArgumentError: if the averages already replace the parameters.
            OutOfMemoryError: if a copy of the parameters does not fit.
            DeviceError: inside a captured function.
        """
    def swap_out(self, /) -> None:
        """
        Restore the adapter's own parameters, bit for bit.

        Raises:
            ArgumentError: if the averages do not replace the parameters.
            DeviceError: inside a captured function.
        """
    def update(self, /) -> None:
        """
        Set each average to d · average + (1 - d) · parameter, where d is the property `decay` before the call.

        Raises:
            ArgumentError: if the averages replace the parameters, as inside `with ema:`.
            DeviceError: if a captured function updates twice.
        """
    @property
    def updates(self, /) -> int:
        """
        The number of calls of `update`.
        """

@final
class FlowMatching:
    """
    The flow-matching objective. At noise level sigma, the model receives `(1 - sigma) * data + sigma * noise` and
    predicts the velocity `noise - data`.

    ```python
    flow = tc.train.FlowMatching("logit_normal", shift=3.0)
    sample, levels, target = flow.noise(tc.randn(2, 16, 8, 8))
    loss = F.mse_loss(tc.zeros(2, 16, 8, 8), target)
    assert flow.sigmas(4)[0] == 1.0
    ```

    Args:
        distribution: the distribution of noise levels from 0 (data) to 1 (noise): "uniform", "logit_normal" or "mode"
            (arXiv:2403.03206).
        shift: a finite number above 0. Each level sigma becomes `shift * sigma / (1 + (shift - 1) * sigma)`. A shift
            above 1 moves levels towards noise, a shift below 1 towards data.

    Raises:
        ArgumentError: if the distribution is unknown, or the shift is not a finite number above 0.
    """
    def __new__(
        cls, /, distribution: str = "uniform", shift: SupportsFloat | SupportsIndex = 1.0
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
        Take one step of Euler's method: move a sample along the velocity to another noise level.

        Args:
            sample: the noised data.
            velocity: the model's output for `sample` at `sigma`, in the shape of `sample`.
            sigma: the noise level of `sample`.
            next_sigma: the noise level of the result.

        Returns:
            `sample + (next_sigma - sigma) * velocity`, in the dtype of `sample`.

        Raises:
            ShapeError: if `velocity` does not have the shape of `sample`.
            DeviceError: if `velocity` is on another device than `sample`.
        """
    def noise(
        self,
        /,
        data: Tensor,
        samples: SupportsGetItem[int, SupportsIndex] | None = None,
        seed: SupportsIndex = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """
        Add noise to a batch of data, each example at its own noise level.

        Args:
            data: (B, ...), floating point; B is the number of examples.
            samples: the sample number of each example; a training run numbers its samples from 0. If given, an
                example's noise and noise level depend only on its sample number and `seed`, and the library's generator
                does not advance. By default, noise and levels come from the library's generator.
            seed: the seed of the training run; without `samples` it has no effect.

        Returns:
            The noised data, the noise levels, and the target of the prediction, `noise - data`. The levels are (B,),
            f32. The noised data and the target have the shape and dtype of the data.

        Raises:
            ShapeError: if the data has no dimension, or `samples` does not have one number for each example.
            DTypeError: if the data is not floating point.
            ArgumentError: if a sample number or the seed is not from 0 to 2**64 - 1.
        """
    def sigmas(self, /, steps: SupportsIndex) -> list[float]:
        """
        Return the noise levels of `steps` sampling steps: `steps + 1` numbers from 1 down to 0, which are evenly spaced
        before they are shifted by `shift`.

        Raises:
            ArgumentError: if `steps` is less than 1.
        """
    def validation_noise(
        self,
        /,
        data: Tensor,
        examples: SupportsGetItem[int, SupportsIndex],
        seed: SupportsIndex = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """
        Add noise to data for a validation loss. With the same seed, an example has the same noise and noise level in
        every call and in any batch. The library's generator does not advance.

        Args:
            data: (B, ...), floating point; B is the number of examples.
            examples: the index of each example in the validation set.
            seed: the seed of noise and levels.

        Returns:
            The same as `noise`.

        Raises:
            ShapeError: if the data has no dimension, or `examples` does not have one index for each example of the
                batch.
            DTypeError: if the data is not floating point.
            ArgumentError: if an index or the seed is not from 0 to 2**64 - 1.
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
        Predict the velocity (noise minus latents) for noisy latents.

        Args:
            hidden_states: noisy latents of B samples as S tokens each, (B, S, in_channels). The features of a token are
                the values of a square of 2 x 2 latents in the order (channel, row, column).
            encoder_hidden_states: the text encoder's results for the L text tokens, (B, L, joint_attention_dim).
            timestep: the time from 0 (clean latents) to 1 (pure noise): (B,), (1,), or a number.
            img_ids: positions of the image tokens, (S, 4): 0, row, column, 0.
            txt_ids: positions of the text tokens, (L, 4): 0, 0, 0, the token's index in the text.
            guidance: the guidance scale, (B,), (1,), or a number. Only a guidance-distilled model (FLUX.2-dev) takes
                this argument.

        Returns:
            A tensor of the shape of `hidden_states`, in the dtype of the weights.

        Raises:
            ShapeError: if the inputs do not fit the model or one another.
            DTypeError: if `hidden_states` is not floating point, or `img_ids` and `txt_ids` have different dtypes.
            ArgumentError: if a model that takes `guidance` gets none, or if one that does not take `guidance` gets it.
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
        Predict the velocity (noise minus latents) for noisy latents.

        Args:
            hidden_states: noisy latents of B samples as S tokens each, (B, S, in_channels). The features of a token are
                the values of a square of 2 x 2 latents in the order (channel, row, column).
            encoder_hidden_states: T5's results for the L text tokens, (B, L, joint_attention_dim).
            pooled_projections: CLIP's pooled text embedding, (B, pooled_projection_dim).
            timestep: the time from 0 (clean latents) to 1 (pure noise): (B,), (1,), or a number.
            img_ids: positions of the image tokens, (S, 3): 0, row, column.
            txt_ids: positions of the text tokens, (L, 3): zeros.
            guidance: the guidance scale, (B,), (1,), or a number: 1 in training, about 3.5 for sampling. Only a
                guidance-distilled model (Flux.1-dev) takes this argument.

        Returns:
            A tensor of the shape of `hidden_states`, in the dtype of the weights.

        Raises:
            ShapeError: if the inputs do not fit the model or one another.
            DTypeError: if `hidden_states` is not floating point, or `img_ids` and `txt_ids` have different dtypes.
            ArgumentError: if a model that takes `guidance` gets none, or if one that does not take `guidance` gets it.
        """

@final
class Generation:
    """
    An iterator that generates several texts. Each iteration chooses the next token of every text that has not ended. It
    returns a list with one element per text: the new token, or None if the text has ended. The iterator stops when all
    texts have ended. `CausalLM.stream` makes one.

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
        End the text with the index `text`. The other texts continue.

        Raises:
            ArgumentError: if `text` is negative or not less than the number of texts.
        """

@final
class GradScaler:
    """
    Scales the loss so that f16 gradients do not vanish, and skips steps whose gradients overflowed, as
    `torch.amp.GradScaler` does.

    An iteration calls `scaler.scale(loss).backward()`, then optionally `scaler.unscale_(optimizer)` and clipping, then
    `scaler.step(optimizer)` and `scaler.update()`. If the loss is on a CUDA device, the first use of the scaler moves
    the scale to the device, so use the scaler once before `tc.cuda.capture`.

    ```python
    scaler = tc.optim.GradScaler()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    tc.optim.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    ```

    Args:
        init_scale: the first scale, above 0.
        growth_factor: the scale is multiplied by this after `growth_interval` steps in a row with finite gradients;
            above 1.
        backoff_factor: the scale is multiplied by this after a step with a non-finite gradient; in (0, 1).
        growth_interval: the number of steps in a row with finite gradients after which the scale grows, at least 1.
        enabled: if False, the scaler changes neither losses nor gradients and takes every step.

    Raises:
        ArgumentError: if a number is out of range.
    """
    def __new__(
        cls,
        /,
        init_scale: SupportsFloat | SupportsIndex = 65536.0,
        growth_factor: SupportsFloat | SupportsIndex = 2.0,
        backoff_factor: SupportsFloat | SupportsIndex = 0.5,
        growth_interval: SupportsIndex = 2000,
        enabled: bool = True,
    ) -> GradScaler: ...
    def get_scale(self, /) -> float:
        """
        Return the current scale; 1 if the scaler is not enabled. On a CUDA device, this method waits for the device's
        work.
        """
    def load_state_dict(self, /, state: dict[str, SupportsFloat | SupportsIndex]) -> None:
        """
        Load `scale` and `growth_tracker` from a result of `state_dict`.

        Raises:
            ConfigError: if an entry is missing.
            ArgumentError: if `scale` is not a finite number above 0, or `growth_tracker` not an integer of at least 0.
        """
    def scale(self, /, loss: Tensor) -> Tensor:
        """
        Return the loss times the scale, or the loss itself if the scaler is not enabled.

        Raises:
            DTypeError: if the loss is not floating point.
        """
    def state_dict(self, /) -> dict[str, float]:
        """
        Return a dict with the scale (`scale`) and the number of steps in a row with finite gradients since the scale
        last changed (`growth_tracker`). On a CUDA device, this method waits for the device's work.
        """
    def step(self, /, optimizer: Optimizer) -> bool | None:
        """
        Let the optimizer take a step with the gradients divided by the scale. If a gradient is non-finite, skip the
        step.

        If `unscale_` has not divided the gradients, `step` divides them: on the CPU in place; on a CUDA device while
        the optimizer reads them, so that `grad` stays scaled.

        Returns:
            Whether the step was taken, always True if the scaler is not enabled. An enabled scaler on a CUDA device
            returns None, because the answer would need synchronization.

        Raises:
            ArgumentError: if `step` was already called for this optimizer since the last `update`.
            The errors of the optimizer's `step`.
        """
    def unscale_(self, /, optimizer: Optimizer) -> None:
        """
        Divide the gradients of the optimizer's variables by the scale, to clip or read the gradients before the step.

        Raises:
            ArgumentError: if `unscale_` or `step` was already called for this optimizer since the last `update`.
        """
    def update(self, /) -> None:
        """
        End the iteration: the scale falls if a gradient was non-finite, and grows after `growth_interval` steps in a
        row with finite gradients.

        Raises:
            ArgumentError: if neither `unscale_` nor `step` was called since the last `update`.
        """

@final
class KVCache:
    """
    The texts that `CausalLM.extend` continues, with the attention keys and values of the texts' tokens.

    ```python
    lm = tc.models.CausalLM.from_pretrained("llama")
    cache = tc.models.KVCache(1)
    scores = lm.extend(cache, [[257, 104]])
    scores = lm.extend(cache, [[105]])  # computes only this token
    assert cache.tokens(0) == [257, 104, 105]
    ```

    Args:
        texts: the number of texts, at least 0.

    Raises:
        ArgumentError: if `texts` is negative.
    """
    def __len__(self, /) -> int: ...
    def __new__(cls, /, texts: SupportsIndex) -> KVCache: ...
    def tokens(self, /, text: SupportsIndex) -> list[int]:
        """
        Return the token ids of the text with the index `text`.

        Raises:
            ArgumentError: if `text` is negative or not less than the number of texts.
        """

@disjoint_base
class LoraConfig:
    """
    The configuration of adapters: which layers get them, and their kind and size. Arguments that peft has too have
    peft's names.

    The entries of `target_modules`, `exclude_modules`, `rank_pattern` and `alpha_pattern` select layers. An entry is
    the whole name of a layer, or the end of its name after a dot ("to_q", "to_out.0"). An entry with other characters
    than letters, digits, "_", "." and "-" is a regular expression for the whole name, or for the end after a dot.
    "all-linear" selects every linear layer, "all-conv" every convolution, and "all-attention" the projections of
    attention.

    ```python
    config = tc.LoraConfig(r=16, lora_alpha=16, target_modules=["to_q", "to_v"], rank_pattern={"to_v": 4})
    layers = {"mid.to_q": (8, 8), "mid.to_v": (8, 8), "mid.to_k": (8, 8)}
    assert config.select(layers) == {"mid.to_q": 16, "mid.to_v": 4}
    ```

    Args:
        r: rank, at least 1.
        lora_alpha: numerator of the scale lora_alpha / r; finite and not 0.
        target_modules: the layers that get an adapter. Default: "all-linear".
        exclude_modules: layers that get no adapter although `target_modules` selects them. Default: none.
        lora_dropout: probability of dropping an element of an adapter's input while training, in [0, 1).
        use_dora: whether adapters of the kind "lora" are weight-decomposed (DoRA), as those of the kind "dora" are.
        use_rslora: whether the scale is lora_alpha / sqrt(r) instead of lora_alpha / r.
        rank_pattern: the ranks of layers whose rank is not `r`, by the entry that selects the layers. If several
            entries select a layer, the first in alphabetical order counts.
        alpha_pattern: as `rank_pattern`, the alphas of layers whose alpha is not `lora_alpha`.
        adapter: the kind of adapter: "lora", "dora", "loha", "lokr" or "oft". OFT has no rank, so it ignores `r` and
            `lora_alpha`.
        wd_on_output: whether DoRA has one magnitude for each output, as in the paper, instead of one for each input.
        decompose_both: whether LoKr's smaller factor may be low-rank, too.
        decompose_factor: the number of rows, and of columns, of LoKr's smaller factor. If this number does not divide a
            layer's number of outputs (or inputs), LoKr takes a smaller divisor. -1 chooses divisors near the square
            roots of these two numbers.
        oft_block_size: the size of the blocks that OFT rotates, at least 2. If it does not divide a layer's number of
            features, OFT uses the nearest divisor.
        oft_side: "input" if OFT rotates the inputs of layers, as in peft; "output" if it rotates their outputs, as in
            LyCORIS and ComfyUI. The default depends on the default file format of the model's adapters: "input" for
            peft's format, "output" for the others.
        use_cayley_neumann: whether OFT of inputs (`oft_side`) computes a Neumann series instead of the Cayley
            transform. In peft the default is True.
        num_cayley_neumann_terms: the number of terms of the Neumann series, from 2 to 64.
        qat: the format for quantization-aware training, "int8", "int4", "fp8" or "nf4". Every forward pass rounds the
            adapted weights of linear layers (base and adapter together) to this format, as
            `nn.functional.fake_quantize` does.
        qat_activations: whether layers with rounded weights also round their inputs, with a scale per token. This needs
            `qat` "int8" or "fp8".
        qat_learned_scales: whether each scale of the rounded weights is multiplied by a learned factor, which starts
            at 1.
        dtype: the dtype of the parameters in training, "f32", or "bf16" for an optimizer with `stochastic_rounding`.
        peft: other arguments of peft's `LoraConfig`, such as `bias="none"`.

    Raises:
        ConfigError: if a value is unknown, out of range or does not fit the other values, or if an argument of peft
            asks for something that this library does not do.
        ArgumentError: if an integer other than `decompose_factor` is negative, or the format `qat` is unknown.
        DTypeError: if the dtype is unknown.
        TypeError: if an argument's name is unknown both here and in peft.
    """
    @classmethod
    def __init_subclass__(cls, /) -> None: ...
    def __new__(
        cls,
        /,
        r: SupportsIndex = 8,
        lora_alpha: SupportsFloat | SupportsIndex = 8.0,
        target_modules: str | Sequence[str] | None = None,
        exclude_modules: str | Sequence[str] | None = None,
        lora_dropout: SupportsFloat | SupportsIndex = 0.0,
        use_dora: bool = False,
        use_rslora: bool = False,
        rank_pattern: dict[str, SupportsIndex] | None = None,
        alpha_pattern: dict[str, SupportsFloat | SupportsIndex] | None = None,
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
        The alphas of layers whose alpha is not `lora_alpha`, by the entry that selects the layers.
        """
    @property
    def decompose_both(self, /) -> bool:
        """
        Whether the smaller factor of LoKr may be low-rank, too.
        """
    @property
    def decompose_factor(self, /) -> int:
        """
        The number of rows, and of columns, of LoKr's smaller factor; -1 if LoKr chooses them.
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
        The number of terms of the Neumann series; 5 without `use_cayley_neumann`.
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
        Return the number of elements of the adapters' parameters, and the bytes of an optimizer's states for them. If
        `dtype` is "bf16", the states are those of an optimizer that rounds stochastically.

        Args:
            layers: as for `select`.
            optimizer: the name of an optimizer in lower case, such as "adamw8bit".

        Raises:
            ConfigError: if there is no such optimizer, or an entry is not a valid regular expression.
            ShapeError: if a shape cannot be that of a layer's weight.
        """
    @property
    def qat(self, /) -> str | None:
        """
        The format to which quantization-aware training rounds adapted weights; None for other training.
        """
    @property
    def qat_activations(self, /) -> bool:
        """
        Whether layers with rounded weights also round their inputs.
        """
    @property
    def qat_learned_scales(self, /) -> bool:
        """
        Whether each scale of the rounded weights is multiplied by a learned factor.
        """
    @property
    def r(self, /) -> int:
        """
        The rank.
        """
    @property
    def rank_pattern(self, /) -> dict[str, int]:
        """
        The ranks of layers whose rank is not `r`, by the entry that selects the layers.
        """
    def select(self, /, layers: dict[str, SupportsGetItem[int, SupportsIndex]]) -> dict[str, int]:
        """
        Return the layers that get an adapter, with their ranks.

        Args:
            layers: the shape of each layer's weight in files, by the layer's name: (out, in) for a linear layer, (out,
                in, height, width) for a convolution.

        Raises:
            ConfigError: if an entry is not a valid regular expression.
        """
    @property
    def target_modules(self, /) -> list[str]:
        """
        The layers that get an adapter.
        """
    @property
    def use_cayley_neumann(self, /) -> bool:
        """
        Whether OFT of inputs computes a Neumann series instead of the Cayley transform.
        """
    @property
    def use_dora(self, /) -> bool:
        """
        Whether adapters of the kind "lora" are weight-decomposed (DoRA), as those of the kind "dora" are.
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
    The base class of models, with the methods for named tensors, adapters, gradient checkpointing and files. Each kind
    of model is a subclass. Calling a model runs its forward pass, but an autoencoder has the methods `encode` and
    `decode` instead. `from_pretrained` loads a model.

    ```python
    unet = tc.models.Model.from_pretrained("sdxl")  # the denoising model of the pipeline
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
            ConfigError: if the configuration matches no layer or does not suit a layer, or if the model has an adapter
                already.
            OutOfMemoryError: if the adapters' parameters do not fit.
        """
    def add_training_adapter(
        self,
        /,
        path: str | bytes | PathLike[str] | PathLike[bytes],
        scale: SupportsFloat | SupportsIndex = 1.0,
    ) -> TrainingAdapter:
        """
        Put the frozen LoRA of a file on the model, in addition to the adapter that is trained, and multiply the frozen
        LoRA's scale by `scale`. Such LoRAs ("training adapters") are published for the training of distilled models.
        Saved files and merged weights do not include the frozen LoRA.

        Raises:
            MissingFileError, WeightsFormatError: if there is no such file, or it has no adapter for this model.
            ConfigError, ShapeError: if the file is not a LoRA of linear layers, if it does not fit the layers, or if a
                layer already has a training adapter.
            ArgumentError: if `scale` is not finite.
        """
    def disable_gradient_checkpointing(self, /) -> None:
        """
        Keep all activations that the backward pass needs, and recompute none.
        """
    @property
    def dtype(self, /) -> DType:
        """
        The dtype of the weights, in which the model computes.
        """
    def enable_gradient_checkpointing(
        self, /, policy: str = "full", *, blocks: SupportsIndex | None = None
    ) -> None:
        """
        Keep only some activations between the forward and the backward pass, and recompute the other activations in the
        backward pass.

        Args:
            policy: "full" keeps the inputs of blocks; "selective" also keeps the results of matrix products and
                attention; "offload" keeps the inputs of blocks in the memory of the host; "none" keeps everything.
            blocks: the number of blocks, from the model's first block on, that get the policy "full" or "offload"; the
                later blocks get "selective". Default: all blocks get the policy.

        Raises:
            ArgumentError: if the policy is unknown, if `blocks` is negative or exceeds the model's number of blocks, or
                if `blocks` is given with the policy "selective" or "none".
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
        Make a model with frozen random weights, to measure the model's speed and memory.

        Args:
            config: the path of a `config.json`; default: the configuration of the published model of this class.
            dtype: the dtype of the weights; default: f32.
            device: the device of the weights.
            quantize, stream_blocks, stream_modulation: as in `from_pretrained`.

        Raises:
            ArgumentError: if called on the base class `Model`, if `quantize` is unknown or the kind has no layers to
                quantize, if the model has fewer blocks than `stream_blocks`, or if it has no separate layers for
                `stream_modulation`.
            MissingFileError, FileError, ConfigError: if the configuration is missing, cannot be read, or belongs to
                another model.
            DTypeError: if the dtype is unknown or not floating point.
            DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
            OutOfMemoryError: if the model does not fit, or if the system cannot allocate the pinned memory.
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
        Load the model at `path` with frozen weights. A subclass's `from_pretrained` returns an object of the subclass;
        `Model.from_pretrained`, also called `load`, returns an object of the subclass that fits the files.

        ```python
        unet = tc.models.load("sdxl", dtype="bf16")
        assert isinstance(unet, tc.models.SDXLUNet)
        ```

        Args:
            path: a model's folder, a weight file beside its `config.json`, a pipeline's folder, an original checkpoint
                in one file, or a name on the Hugging Face hub, "organisation/name". From a pipeline or an original
                checkpoint, `Model.from_pretrained` loads the denoising model (the UNet or transformer).
            dtype: the dtype to which the weights are converted; default: the dtype of most weights in the files.
            device: the device of the weights.
            subfolder: the name of the model's folder in a pipeline ("unet", "vae", "text_encoder", "text_encoder_2"),
                which also selects the model of an original checkpoint. Default: the first folder that fits the class.
            config: the path of a `config.json`, or of a pipeline's folder that has one, to use instead of the
                configuration beside the weights.
            force_upcast: whether the weights become f32 even if half precision is requested or stored. By default the
                model's configuration decides. The configuration of SDXL's autoencoder requests f32, because the
                autoencoder's activations exceed the range of f16.
            layers: the number of layers of a language model to load, from the first on, to read their `hidden_states`;
                default: all.
            quantize: "int8", "fp8", "nf4", "q8_0" or "q4_0": the format to which the linear layers of blocks are
                quantized while they are read, as by the function `quantize`. The other weights have `dtype`.
            stream_blocks: the number of transformer blocks that keep the weights of linear layers in pinned host
                memory. The weights of such a block are copied to the device before the block runs, on a separate CUDA
                stream. The device holds the copied weights of two such blocks at a time.
            stream_modulation: whether the weights of the layers that compute the modulation of all blocks are in pinned
                host memory too. For Flux these weights take 6 GiB, and each step reads them once.

        Raises:
            MissingFileError, FileError, WeightsFormatError: if files are missing, cannot be read, or are damaged.
            ConfigError: if the configuration belongs to another model, is not supported, or does not fit the weights.
            ArgumentError: if `layers` is given for a model that is not a language model or is not from 1 to its number
                of layers, if `quantize` is unknown or given for a kind of model without layers to quantize, if the
                model has fewer blocks than `stream_blocks`, or if it has no separate layers for `stream_modulation`.
            DTypeError: if the dtype is unknown or not floating point.
            DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
            OutOfMemoryError: if the model does not fit, or if the system cannot allocate the pinned memory.
        """
    def get_tensor(self, /, name: str) -> Tensor:
        """
        Return the tensor `named_tensors()[name]`. Unlike `named_tensors`, this method dequantizes only this tensor.

        Raises:
            ArgumentError: if the model has no parameter of this name.
        """
    def load_adapter(
        self,
        /,
        path: str | bytes | PathLike[str] | PathLike[bytes],
        scale: SupportsFloat | SupportsIndex = 1.0,
    ) -> AdapterSet:
        """
        Put the adapters of a file on the model and multiply the adapters' scales by `scale`. The file may have any of
        the formats of `AdapterSet.save`, and any tool may have written it. The file's adapters for other models of a
        pipeline are ignored.

        Raises:
            MissingFileError, WeightsFormatError: if there is no such file, or it has no adapter for this model.
            ConfigError, ShapeError: if the model has an adapter already, or the file's adapters do not fit its layers.
            ArgumentError: if `scale` is 0 or not finite.
        """
    def merge_adapter(self, /) -> None:
        """
        Make each adapted layer compute with one merged weight, as fast as an unquantized layer without an adapter.
        Later changes of the adapters' parameters have no effect until `unmerge_adapter`.

        Raises:
            ArgumentError: if the model has no adapter.
        """
    def named_parameters(self, /) -> dict[str, Var]:
        """
        Return the model's trainable parameters by name, without the parameters of adapters. A model from
        `from_pretrained` has none. In a model from the constructor, all parameters are trainable.
        """
    def named_tensors(self, /) -> dict[str, Tensor]:
        """
        Return every parameter by name, quantized weights dequantized. Parameters of adapters are not included, but if
        an adapter is merged, the weight of its layer is the merged weight.
        """
    def remove_adapter(self, /) -> None:
        """
        Remove the adapters, merged or not. The model then computes exactly the results of its frozen weights.
        """
    def save_pretrained(
        self, /, folder: str | bytes | PathLike[str] | PathLike[bytes], quantize: str | None = None
    ) -> None:
        """
        Write `config.json` and the weights to a folder that diffusers and transformers can load. Adapters are not
        written, but if an adapter is merged, the weight of its layer is the merged weight.

        Args:
            folder: the folder, which is created if missing.
            quantize: "nf4" quantizes all linear layers that may be quantized: it writes them as bitsandbytes does, in
                four bits with scales in f32. `config.json` names the linear layers that are not quantized. If diffusers
                cannot tell such a name apart from the name of a quantized layer, both layers are quantized: this
                happens to the last layer of Flux.

        Raises:
            FileError: if a file cannot be written.
            ArgumentError: if only a part of the model's layers was loaded, if the format is not "nf4", or if the model
                has no layers that may be quantized.
            DTypeError: if a layer to quantize is f64.
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
    This process's membership in a group of processes with one GPU each. All processes of the group must make one at the
    same time, with equal `size` and `unique_id`.

    Args:
        device: the GPU of this process.
        rank: the number of this process, from 0.
        size: the number of processes in the group.
        unique_id: the bytes that rank 0 got from `nccl_unique_id`.
        seconds: how long to wait for the other processes.

    Raises:
        CudaUnavailableError: if NCCL cannot be used.
        ArgumentError: if a number is out of range.
        DeviceError: if `device` is not a CUDA device, if NCCL fails, or if not all processes have joined in time.
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
        Return the sum, over all processes, of each process's `tensor`. The call only queues the work.

        Raises:
            DTypeError: if NCCL cannot send the tensor's dtype.
            DeviceError: if the tensor is not on the device of this communicator, if NCCL fails, or if `stop` was
                called.
        """
    def all_reduce_gradients(
        self, /, parameters: Iterable[Var] | Mapping[str, Var], tail: Tensor, narrow: bool = False
    ) -> Tensor:
        """
        Replace each gradient by its sum over all processes, and sum one more tensor over the processes. The call only
        queues the work.

        Args:
            parameters: the variables, in the same order in all processes. A missing gradient counts as zeros.
            tail: this process's tensor for the second sum, such as losses and counts of the step.
            narrow: whether the gradients are sent as bf16. This halves the bytes of f32 gradients, and rounds every sum
                to bf16.

        Returns:
            The sum of `tail` over all processes.

        Raises:
            DTypeError: if NCCL cannot send a dtype.
            DeviceError: if a variable or `tail` is not on the device of this communicator, if NCCL fails, or if `stop`
                was called.
            OutOfMemoryError: if the vectors of gradients do not fit into memory.
        """
    def broadcast_(self, /, var: Var, root: SupportsIndex) -> None:
        """
        Set a variable to its values on process `root`. The call only queues the work.

        Raises:
            ArgumentError: if there is no such process.
            DTypeError: if NCCL cannot send the variable's dtype.
            DeviceError: if the variable is not on the device of this communicator, if NCCL fails, or if `stop` was
                called.
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
        Make the current or the next call that waits for other processes raise a DeviceError. Any thread may call
        `stop`, for example when another process has ended.
        """
    def wait(self, /, seconds: SupportsFloat | SupportsIndex) -> None:
        """
        Wait until all work queued on the GPU is done.

        Raises:
            DeviceError: inside a captured function. Also if waiting takes longer than `seconds`, if `stop` was called,
                or if NCCL or a kernel fails; then the communicator cannot be used afterwards.
            ArgumentError: if `seconds` is negative, NaN or at least 2**64.
        """

@final
class NoiseSchedule:
    """
    The noise level of each timestep in a diffusion model's training. The arguments have diffusers' names, and their
    defaults are SDXL's values.

    ```python
    schedule = tc.train.NoiseSchedule(prediction_type="v_prediction", rescale_betas_zero_snr=True)
    assert (schedule.num_train_timesteps, schedule.alphas_cumprod[-1]) == (1000, 0.0)
    ```

    Args:
        beta_schedule: how beta, the variance of the noise that a timestep adds, grows with the timestep: "linear",
            "scaled_linear" (the square root of beta grows linearly) or "squaredcos_cap_v2" (arXiv:2102.09672; it
            ignores `beta_start` and `beta_end`).
        beta_start: beta of the first timestep, in (0, 1).
        beta_end: beta of the last timestep, in (0, 1).
        num_train_timesteps: the number of timesteps, at least 2.
        prediction_type: what the model predicts: "epsilon" (the noise) or "v_prediction" (the velocity,
            sqrt(a) * noise - sqrt(1 - a) * data, where a is the timestep's entry of `alphas_cumprod`;
            arXiv:2202.00512).
        rescale_betas_zero_snr: whether all betas are rescaled so that the last timestep is pure noise
            (arXiv:2305.08891).
        timestep_spacing: how samplers pick timesteps: "leading", "trailing" or "linspace" (arXiv:2305.08891, table 2).
        steps_offset: the number that samplers add to each timestep of the "leading" spacing.

    Raises:
        ArgumentError: if `beta_schedule`, `prediction_type` or `timestep_spacing` is unknown, or if a number is out of
            range.
    """
    def __new__(
        cls,
        /,
        beta_schedule: str = "scaled_linear",
        beta_start: SupportsFloat | SupportsIndex = 0.00085,
        beta_end: SupportsFloat | SupportsIndex = 0.012,
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
        The number a of each timestep, where the noised data is sqrt(a) * data + sqrt(1 - a) * noise. If the data has
        variance 1, a is the data's share of the variance of the noised data.
        """
    @staticmethod
    def from_pretrained(path: str | bytes | PathLike[str] | PathLike[bytes]) -> NoiseSchedule:
        """
        Read a noise schedule from diffusers' configuration. Missing entries have SDXL's values.

        Args:
            path: the path of a `scheduler_config.json`, of its folder, or of a pipeline's folder that has the file in
                its folder `scheduler`.

        Raises:
            MissingFileError: if there is no `scheduler_config.json` at the path.
            ConfigError: if the file is not JSON, or an entry has the wrong type or an unknown name.
            ArgumentError: if a number is out of range.
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
        Whether all betas were rescaled so that the last timestep is pure noise.
        """
    @property
    def sigmas(self, /) -> list[float]:
        """
        The noise-to-data ratio of each timestep: sqrt((1 - a) / a), where a is the timestep's entry of
        `alphas_cumprod`, but at least 2**-24, so that the ratio is finite.
        """
    @property
    def timestep_spacing(self, /) -> str:
        """
        How samplers pick timesteps: "leading", "trailing" or "linspace".
        """

@final
class NoisedLatents:
    """
    A noised batch: the model's input, and the target of the model's prediction.

    ```python
    objective = tc.train.DiffusionObjective(tc.train.NoiseSchedule())
    noised = objective.noise(tc.randn(2, 4, 8, 8))
    assert noised.timesteps.shape == (2,) and noised.target.shape == (2, 4, 8, 8)
    ```

    Args:
        sample: the noised latents, (B, C, ...).
        timesteps: the timestep of each example, (B,), i64 or u32.
        target: the target of the prediction, in the shape of the latents, f32.
    """
    def __new__(cls, /, sample: Tensor, timesteps: Tensor, target: Tensor) -> NoisedLatents: ...
    @property
    def sample(self, /) -> Tensor:
        """
        The noised latents, in the shape and dtype of the latents without noise.
        """
    @property
    def target(self, /) -> Tensor:
        """
        The target of the prediction, in the shape of the latents, f32.
        """
    @property
    def timesteps(self, /) -> Tensor:
        """
        The timestep of each example: (B,), i64, or the dtype of the timesteps that `noise_at` got.
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
    resumed = tc.optim.AdamW(model.parameters(), lr=1e-4)
    resumed.load_state_dict(optimizer.state_dict())
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
        Make an optimizer of the kind `kind`, such as "AdamW", over the variables `params`. `settings` has
        hyper-parameters by name; all others have the kind's defaults. The docstrings of the subclasses describe the
        other arguments and the errors.
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
        Replace the variables' values by the averages that the optimizer keeps, for validation or saving. `eval` does
        nothing if the optimizer keeps no averages, or if they have already replaced the values.

        Raises:
            OutOfMemoryError: if a copy of the variables does not fit into memory.
            DeviceError: if called inside a function that is being captured (`tc.cuda.capture`).
        """
    @property
    def group_lrs(self, /) -> list[float]:
        """
        The learning rate of each parameter group. To change them, assign a list with one number for each group.

        Raises:
            ArgumentError: on assignment, if there is not one number for each group, or if a number is negative or
                non-finite.
            DeviceError: on assignment inside a function that is being captured (`tc.cuda.capture`).
        """
    @group_lrs.setter
    def group_lrs(self, /, lrs: SupportsGetItem[int, SupportsFloat | SupportsIndex]) -> None: ...
    def load_state_dict(self, /, state: dict[str, Tensor]) -> None:
        """
        Load the states of an optimizer of the same kind over variables of the same shapes. After the errors below,
        nothing has changed. But if the states cannot be copied to a GPU, the optimizer has loaded them, and its next
        step tries the copy again.

        Raises:
            ConfigError: if the states come from an optimizer of another kind; if they were saved with stochastic
                rounding and this optimizer does not round stochastically, or the reverse; or if states are missing, not
                expected or invalid.
            ShapeError, DTypeError: if a state has another shape or dtype.
            ArgumentError: if `eval` has replaced the variables' values, or if a learning rate is negative or
                non-finite.
            DeviceError: if called inside a function that is being captured (`tc.cuda.capture`).
        """
    @property
    def lr(self, /) -> float:
        """
        The learning rate of the first parameter group. Assignment sets the learning rate of all groups.

        Raises:
            ArgumentError: on assignment, if the number is negative or non-finite.
            DeviceError: on assignment inside a function that is being captured (`tc.cuda.capture`).
        """
    @lr.setter
    def lr(self, /, lr: SupportsFloat | SupportsIndex) -> None: ...
    @property
    def state_bytes(self, /) -> int:
        """
        The number of bytes of all existing states and master values. On the CPU, a variable's first step creates the
        variable's states. On a CUDA device, the first step of any variable creates the states of all variables; with
        `states="host"`, the constructor creates them.
        """
    def state_dict(self, /) -> dict[str, Tensor]:
        """
        Return a copy of all states on the CPU, as a dict with the following entries. INDEX counts the variables of all
        groups from 0.

        - `INDEX.NAME`: the state NAME of the variable
        - `INDEX.master`: the f32 master values of the variable, if it has them
        - `step` (i64): the number of steps of each variable
        - `lr` (f64): the learning rate of each group
        - `kind` (u8): the optimizer's name in ASCII
        - `seed` (i64): the seed of the random bits, if the optimizer rounds stochastically
        - states that belong to no variable, such as Prodigy's estimate, under their own names
        """
    def step(self, /, *, if_finite: Tensor | None = None) -> None:
        """
        Update every variable that has a gradient. The gradients are kept until `zero_grad`.

        Args:
            if_finite: a tensor of one element, such as the norm that `clip_grad_norm_` returned. If the element is
                infinite or NaN, nothing changes and no step is counted. A CUDA device decides this by itself; the host
                does not wait.

        Raises:
            ShapeError: if `if_finite` does not have exactly one element.
            ArgumentError: if `eval` has replaced the variables' values, or a variable was replaced by a copy on another
                device or in another dtype.
            OutOfMemoryError: if the states do not fit into memory.
        """
    def train(self, /) -> None:
        """
        Restore the values that `eval` has replaced, bit for bit. Call `train` before the next step. It does nothing if
        `eval` has not replaced the values.

        Raises:
            DeviceError: if called inside a function that is being captured (`tc.cuda.capture`).
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
    def blocks_to_checkpoint(self, /) -> int:
        """
        The number of blocks that can have a checkpointing policy, as `blocks` of `enable_gradient_checkpointing` counts
        them.
        """
    @property
    def can_be_quantized(self, /) -> bool:
        """
        Whether the model has layers that may be quantized, and its file is not a GGUF file with quantized layers. The
        quantized layers of a GGUF file stay so without `quantize`, which would round their values a second time.
        """
    def check_format(self, /, format: str, adapter: str, layers: SupportsGetItem[int, str]) -> None:
        """
        Check that a file format can hold adapters of the kind `adapter` on `layers`. For a model that belongs to no
        family, every format can.

        Args:
            format: "diffusers", "kohya", "comfyui" or "peft".
            adapter: the kind of the adapters, such as "lora".
            layers: the names of the layers that get an adapter.

        Raises:
            ArgumentError: if the format is unknown, or cannot hold these adapters. In the second case, the message
                names a format that can.
            ConfigError: if there is no such kind.
        """
    @property
    def class_name(self, /) -> str:
        """
        The name of the model's class in `trainable_candle.models`.
        """
    @property
    def config(self, /) -> dict[str, Any]:
        """
        The model's configuration, as its `config.json` has it.
        """
    @property
    def dtype(self, /) -> DType | None:
        """
        The floating-point dtype of most of the model's elements in its file; None if its elements have no such dtype.
        """
    @property
    def elements(self, /) -> int:
        """
        The number of elements of all parameters of the model.
        """
    def forward_flops(
        self, /, *, height: SupportsIndex = 0, width: SupportsIndex = 0, tokens: SupportsIndex = 0
    ) -> tuple[int, int]:
        """
        Return the number of floating-point operations of a forward pass over one sample, without adapters, as a pair:
        those of the layers, and those of attention.

        Args:
            height: the height of the input, which is latents or an image; 0 for a model that takes text only.
            width: the width of the input.
            tokens: the number of tokens of the text; 0 for a model that takes no text.
        """
    @property
    def has_modulation(self, /) -> bool:
        """
        Whether the model has separate layers, which compute the blocks' modulation, whose weights `stream_modulation`
        can keep in host memory.
        """
    @property
    def layers(self, /) -> dict[str, list[int]]:
        """
        The shapes of the weights of the layers that can have adapters, by the layers' names: (out, in), or (out, in,
        height, width) for a convolution.
        """
    @property
    def path(self, /) -> Path:
        """
        The path that was given to `inspect` and holds the model: one of `others`, or else `path`.
        """
    def recomputed_share(
        self,
        /,
        policy: str,
        *,
        blocks: SupportsIndex | None = None,
        height: SupportsIndex = 0,
        width: SupportsIndex = 0,
        tokens: SupportsIndex = 0,
    ) -> float:
        """
        Return which share of the floating-point operations of the blocks' forward pass the backward pass repeats, from
        0 to 1.

        Args:
            policy: "none", "full", "selective" or "offload" checkpointing. "selective" repeats only operations that are
                not counted (norms, activations, sums).
            blocks: the number of blocks that get the policy, as in `enable_gradient_checkpointing`.
            height: the height of the input, which is latents or an image; 0 for a model that takes text only.
            width: the width of the input.
            tokens: the number of tokens of the text; 0 for a model that takes no text.

        Raises:
            ArgumentError: as for `enable_gradient_checkpointing`.
        """
    def saved_values(
        self,
        /,
        config: LoraConfig,
        policy: str,
        *,
        blocks: SupportsIndex | None = None,
        height: SupportsIndex = 0,
        width: SupportsIndex = 0,
        tokens: SupportsIndex = 0,
    ) -> tuple[int, int]:
        """
        Return approximately how many values are saved for the backward pass of one sample, at the peak.

        Args:
            config: the configuration of the adapters.
            policy: "none", "full", "selective" or "offload" checkpointing.
            blocks: the number of blocks that get the policy, as in `enable_gradient_checkpointing`.
            height: the height of the input, which is latents or an image; 0 for a model that takes text only.
            width: the width of the input.
            tokens: the number of tokens of the text; 0 for a model that takes no text.

        Returns:
            The number of values on the device, and the number in host memory, which is 0 unless `policy` is "offload".

        Raises:
            ArgumentError: as for `enable_gradient_checkpointing`.
            ConfigError: if `config` has a wrong pattern or kind of adapter.
        """
    @property
    def stored_format(self, /) -> str | None:
        """
        The format in which the file stores every layer that may be quantized: "int8", "fp8" or "nf4". None if these
        layers have different formats, or another one. With this format as `quantize`, `from_pretrained` keeps the
        file's codes.
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
        Return how many bytes the streamed weights take in host memory, as a pair: those of the blocks, and those of the
        layers that compute the blocks' modulation. The arguments and the errors are those of `weight_bytes`.
        """
    @property
    def tensors(self, /) -> dict[str, list[int]]:
        """
        The shapes of the model's parameters by name, as in files.
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
        Return how many bytes the model's weights take on a device. With streaming, this includes the device memory to
        which streamed weights are copied, but not the weights in host memory.

        Args:
            dtype: the dtype of the weights that are not quantized.
            quantize: the format of the linear layers that may be quantized, as in `from_pretrained`.
            stream_blocks: as in `from_pretrained`.
            stream_modulation: as in `from_pretrained`.

        Raises:
            ArgumentError: if the format is unknown, if a format is given and the model has no layers that may be
                quantized, if the model has fewer blocks than `stream_blocks`, or if it has no separate layers for
                `stream_modulation`.
        """
    def widest_gradient(
        self,
        /,
        config: LoraConfig,
        *,
        height: SupportsIndex = 0,
        width: SupportsIndex = 0,
        tokens: SupportsIndex = 0,
    ) -> int:
        """
        Return the number of values in the largest gradient of activations that the backward pass computes for one
        sample. It is the gradient of the results of layers that share an input, and exists in addition to the saved
        values.

        Args:
            config: the configuration of the adapters.
            height: the height of the input, which is latents or an image; 0 for a model that takes text only.
            width: the width of the input.
            tokens: the number of tokens of the text; 0 for a model that takes no text.

        Raises:
            ConfigError: if `config` has a wrong pattern or kind of adapter.
        """

@final
class QuantizedTensor:
    """
    A frozen matrix, stored as a code of four to eight bits for each element, and scales. `quantize` makes one, and
    `nn.functional.linear` takes it as a weight.

    ```python
    weight = tc.quantize(tc.randn(64, 128), "int8")
    y = tc.nn.functional.linear(tc.randn(3, 128), weight)
    assert y.shape == (3, 64)
    assert weight.nbytes == 64 * 128 + 64 * 4  # a byte for each element, an f32 scale for each row
    ```
    """
    def __repr__(self, /) -> str: ...
    def dequantize(self, /, dtype: DType | str | None = None) -> Tensor:
        """
        Return the values that the codes and scales represent, computed in f32 and rounded once.

        Args:
            dtype: the dtype of the result; default: the dtype of the matrix.

        Raises:
            DTypeError: if the dtype is not floating point.
            OutOfMemoryError: if the values do not fit into memory.
        """
    @property
    def device(self, /) -> str:
        """
        The device, such as "cpu" or "cuda:0".
        """
    @property
    def dtype(self, /) -> DType:
        """
        The dtype of the values that the matrix represents.
        """
    @property
    def format(self, /) -> str:
        """
        The name of the format: "int8", "fp8", "nf4", or a block format of ggml, such as "q8_0" or "q4_k".
        """
    @staticmethod
    def from_blocks(
        blocks: Tensor, format: str, dtype: DType | str | None = None
    ) -> QuantizedTensor:
        """
        Make a matrix from ggml blocks, as GGUF files store them.

        Args:
            blocks: u8, (rows, number of bytes of each row's blocks).
            format: "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k" or "q6_k".
            dtype: the dtype of the values that the matrix represents; default f32.

        Raises:
            ArgumentError: if the format is unknown.
            ShapeError: if `blocks` is not a matrix, or the bytes of a row are not a whole number of blocks.
            DTypeError: if `blocks` is not u8, or `dtype` is not floating point.
        """
    @property
    def nbytes(self, /) -> int:
        """
        The number of bytes of the codes and scales.
        """
    def numel(self, /) -> int:
        """
        Return the number of elements.
        """
    @property
    def shape(self, /) -> tuple[int, ...]:
        """
        The shape: (rows, columns).
        """
    def tensors(self, /) -> dict[str, Tensor]:
        """
        Return a dict of the tensors that store the matrix: "codes" (u8) and "scales" (f32). A matrix in "nf4" also has
        "scale_codes" (u8) and "offset" (f32), because its scales are quantized too. A matrix of ggml blocks has only
        "codes": its blocks contain the scales.
        """
    def to(self, /, device: str) -> QuantizedTensor:
        """
        Return the same matrix on another device.

        Raises:
            DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
            OutOfMemoryError: if the copy does not fit into memory.
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
        Predict the velocity (noise minus latents) for noisy latents.

        Args:
            hidden_states: noisy latents of B samples as S tokens each, (B, S, in_channels). The features of a token are
                the values of a square of 2 x 2 latents in the order (channel, row, column).
            encoder_hidden_states: Qwen2.5-VL's results for the L text tokens, (B, L, joint_attention_dim).
            timestep: the time from 0 (clean latents) to 1 (pure noise): (B,), (1,), or a number.
            img_ids: positions of the image tokens, (S, 3): 0, row, column. Rows and columns are counted from the middle
                of the image: if there are n of them, their coordinates are n // 2 - n to n // 2 - 1.
            txt_ids: positions of the text tokens, (L, 3). If the image has h rows and w columns of tokens, all three
                coordinates of text token i are max(h // 2, w // 2) + i.
            lengths: for each sample, the number of text tokens that other tokens attend to, (B,), at least 1. The later
                tokens are padding. With `lengths`, L is at most 4096. Default: all L tokens; then attention needs no
                mask, which saves time.

        Returns:
            A tensor of the shape of `hidden_states`, in the dtype of the weights.

        Raises:
            ShapeError: if the inputs do not fit the model or one another.
            DTypeError: if `hidden_states` is not floating point, or `img_ids` and `txt_ids` have different dtypes.
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
        Predict the velocity (noise minus latents) for noisy latents.

        Args:
            hidden_states: noisy latents of B samples, (B, 16, h, w), shifted and scaled by the autoencoder's
                `shift_factor` and `scaling_factor`; h and w must be even.
            encoder_hidden_states: the text encoders' results for the L text tokens, (B, L, joint_attention_dim).
            pooled_projections: the pooled text embedding, (B, pooled_projection_dim).
            timestep: the time from 0 (clean latents) to 1000 (pure noise): (B,), (1,), or a number.

        Returns:
            A tensor of the shape of `hidden_states`, in the dtype of the weights.

        Raises:
            ShapeError: if the inputs do not fit the model or one another.
            DTypeError: if `hidden_states` is not floating point.
        """

@final
class SDXLUNet(Model):
    """
    SDXL's UNet, with the results and the parameter names of diffusers' `UNet2DConditionModel`. `from_pretrained` loads
    one.

    ```python
    # The tiny SDXL in the package: 128 text features instead of 2048, 64 pooled ones instead of 1280.
    unet = tc.models.SDXLUNet.from_pretrained("sdxl", "f32")
    text, pooled = tc.randn(1, 77, 128), tc.randn(1, 64)
    sizes = tc.tensor([[128, 128, 0, 0, 128, 128]])  # an image of 128 x 128 pixels, not cropped
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
        Predict the noise in noisy latents, or their velocity if the model was trained to predict the velocity.

        Args:
            sample: noisy latents of B images, (B, 4, h, w), scaled by the autoencoder's `scaling_factor`.
            timestep: the diffusion timestep from 0 (least noise) to 999 (most noise): (B,), (1,), or a number.
            encoder_hidden_states: the text encoders' results for the L text tokens, (B, L, cross_attention_dim).
            text_embeds: the pooled text embedding of P features, (B, P).
            time_ids: the sizes and the crop of each image in pixels, (B, 6): original height and width, top and left of
                the crop, target height and width.

        Returns:
            A tensor of the shape of `sample`, in the dtype of the weights.

        Raises:
            ShapeError: if the inputs do not fit the model or one another.
            DTypeError: if `sample` is not floating point.
            ArgumentError: if a timestep in host memory is not finite.
        """

@final
class Sampler:
    """
    One sampling run of a diffusion model, from noise to data.

    ```python
    sampler = tc.train.Sampler(tc.train.NoiseSchedule(), 10, "dpmpp_2m")
    x = sampler.init_noise(tc.randn(1, 4, 8, 8))
    for i, timestep in enumerate(sampler.timesteps):
        output = tc.zeros(1, 4, 8, 8)  # a model computes it from sampler.scale_input(x, i) and timestep
        x = sampler.step(output, i, x)
    ```

    Args:
        schedule: the noise schedule of the model's training.
        steps: the number of sampling steps, at least 1.
        kind: "euler" (diffusers' EulerDiscreteScheduler) or "dpmpp_2m" (DPM-Solver++ of second order, arXiv:2211.01095;
            diffusers' DPMSolverMultistepScheduler).
        karras_sigmas: whether the noise levels `sigmas` are spaced as in arXiv:2206.00364, equation 5.

    Raises:
        ArgumentError: if the kind is unknown, or if there are no steps or too many: "euler" takes at most as many steps
            as the schedule has timesteps, "dpmpp_2m" one fewer.
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
        Scale standard normal noise to the sample at step 0, in f32 (f64 for f64 noise).

        Args:
            noise: standard normal values.
        """
    def scale_input(self, /, x: Tensor, i: SupportsIndex) -> Tensor:
        """
        Scale the sample at step `i` to the model's input.

        Args:
            x: the sample at step `i`.
            i: the step, from 0.

        Raises:
            ArgumentError: if there is no step `i`.
        """
    @property
    def sigmas(self, /) -> list[float]:
        """
        The noise-to-data ratio of the sample at each step, followed by 0 for the finished sample.
        """
    def step(self, /, model_output: Tensor, i: SupportsIndex, x: Tensor) -> Tensor:
        """
        Compute the sample at the next noise level. Call this function for all steps in order; step 0 starts a new run.

        Args:
            model_output: the model's output for `scale_input(x, i)` at the timestep `timesteps[i]`.
            i: the step, from 0.
            x: the sample at step `i`.

        Returns:
            The sample at step `i + 1`, f32 (f64 for f64 samples).

        Raises:
            ArgumentError: if there is no step `i`, or, for "dpmpp_2m", if `i` is neither 0 nor the step after the
                previous call's step.
            ShapeError: if `model_output` does not have the shape of `x`.
        """
    @property
    def timesteps(self, /) -> list[float]:
        """
        The timestep that the model receives at each step.
        """

@final
class Schedule:
    """
    A learning-rate schedule with warm-up, as in transformers: the factor that multiplies the initial learning rate in
    each step. Over the first `warmup_steps` steps the factor rises linearly from 0 to 1; afterwards
    `kind` determines it.

    Args:
        kind: "constant", "linear", "cosine" or "polynomial".
        warmup_steps: the number of steps of the warm-up.
        total_steps: the number of steps of the training, warm-up included; "constant" ignores it.
        num_cycles: for "cosine", the number of periods of the cosine, at least 0. With 0.5, the factor falls from 1 at
            the end of the warm-up to 0 at the end of the training.
        end: for "polynomial", the factor at the end of the training and after it, in [0, 1).
        power: for "polynomial", the exponent, above 0; 1 gives a straight line.

    Raises:
        ArgumentError: if the kind is unknown or a number is out of range.
    """
    def __new__(
        cls,
        /,
        kind: str,
        warmup_steps: SupportsIndex = 0,
        total_steps: SupportsIndex = 0,
        *,
        num_cycles: SupportsFloat | SupportsIndex = 0.5,
        end: SupportsFloat | SupportsIndex = 0.0,
        power: SupportsFloat | SupportsIndex = 1.0,
    ) -> Schedule: ...
    def factor(self, /, step: SupportsIndex) -> float:
        """
        Return the factor of the learning rate in step `step`, counted from 0.

        Raises:
            ArgumentError: if `step` is negative.
        """

@final
class T5Encoder(Model):
    """
    T5's encoder, a text encoder of Stable Diffusion 3, Flux and Chroma, with the results of transformers'
    `T5EncoderModel`. With weights in f16, activations that would exceed the range of f16 are scaled or kept in f32.
    `from_pretrained` loads an encoder.
    """
    def __call__(self, /, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """
        Compute the hidden states of the tokens after the last block and the final norm: (B, L, D), in the dtype of the
        weights. D is the number of features of a token.

        Args:
            input_ids: the ids of L tokens for each of B texts, (B, L), i64 or u32; L is at least 1.
            attention_mask: (B, L), i64 or u32: 1 for tokens that other tokens attend to, 0 for the rest. Default: 1 for
                all tokens, padding included, as in diffusers' pipelines.

        Raises:
            ShapeError: if an input has another shape.
            IndexOutOfRangeError: if an id is not a token, or the mask has other values than 0 and 1.
            DTypeError: if an input has another dtype than i64 or u32.
        """

@disjoint_base
class Tensor(ComposedMethods):
    """
    An immutable array of numbers on a device.

    Make one with `tensor`, `zeros`, `randn` and similar functions. The tape records operations on tensors that depend
    on a `Var`, and `backward` computes gradients from the tape. Shapes broadcast as in numpy. Elementwise arithmetic
    and comparisons of two tensors promote dtypes as torch does; other operations need tensors of one dtype. A Python
    number gets the tensor's dtype, except that a Python float and a tensor of integers give a result in f32.

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
        A view with the dimensions in reverse order; the transpose, if the tensor is a matrix.
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
        Return a capsule for other libraries' `from_dlpack`. The memory is reused only after the consumer has released
        the capsule's tensor.

        Args:
            stream: on a CUDA device, the consumer's stream, which waits for the values: 1 (the default stream; also if
                None), 2 (the per-thread default stream) or the address of a stream. With -1, no stream waits.
            max_version: the newest version of DLPack that the consumer supports. Before 1.0 there are no read-only
                tensors.
            dl_device: this tensor's device, as `__dlpack_device__` returns it.
            copy: whether the capsule has a copy instead of sharing this tensor's memory. Default: only if the consumer
                does not support read-only tensors.

        Raises:
            BufferError: if `dl_device` is another device, or `stream` does not suit this tensor's device.
            AutogradError: if this tensor needs a gradient.
            DeviceError: if the driver reports an error, or inside a captured function.
            OutOfMemoryError: if the copy does not fit into memory.
        """
    def __dlpack_device__(self, /) -> tuple[int, int]:
        """
        Return DLPack's type of this tensor's device (1 for the CPU, 2 for CUDA), and the device's index.
        """
    def __eq__(self, other: object, /) -> Tensor: ...
    def __float__(self, /) -> builtins.float: ...
    def __format__(self, /, spec: str) -> str:
        """
        Format the only element like a Python number. Without a format specification, a tensor with dimensions gives its
        `repr`, as in torch.

        Raises:
            ShapeError: if there is a format specification, and not exactly one element.
            DeviceError: for a tensor on a GPU inside a function that is being captured (`tc.cuda.capture`).
        """
    def __ge__(self, other: object, /) -> Tensor: ...
    def __getitem__(self, index: Any, /) -> Tensor:
        """
        Index with integers, slices with any step, None and `...` as in numpy. The index may also contain either one
        tensor of integers (positions along one dimension) or one u8 mask, as in torch; an array or a list counts as a
        tensor. The result is a view unless the index contains a tensor or a slice with a step other than 1. Indexing is
        differentiable.

        Raises:
            IndexOutOfRangeError: if a position is out of range, the index has more dimensions than this tensor, a mask
                has another shape than the dimensions to which it applies, `...` appears twice, or an entry has another
                type.
            DTypeError: if a tensor in the index is not u8, u32 or i64.
            ArgumentError: if the index contains several tensors, or an integer outside the range of i64.
            ValueError: if the step of a slice is 0.
            DeviceError: if the index contains a tensor on a GPU inside a function that is being captured.
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
        Return the function and the arguments from which `pickle` or `copy` makes the tensor again. A variable becomes a
        variable without a gradient; any other tensor becomes a constant.
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
        Return the absolute value of each element; the gradient at 0 is 0.
        """
    def argmax(self, /, dim: SupportsIndex | None = None, keepdim: bool = False) -> Tensor:
        """
        Return the index of the largest element, in i64. If several elements are largest, return the index of the first
        of them. NaN counts as the largest. The result has no gradient.

        Args:
            dim: the dimension to reduce; by default, the result is the index in the flattened tensor.
            keepdim: whether the result keeps the reduced dimensions, with size 1.

        Raises:
            IndexOutOfRangeError: if the dimension is out of range.
            ShapeError: if a reduced dimension has the size 0.
            DTypeError: if the tensor is not floating point.
        """
    def backward(self, /, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        """
        Differentiate this tensor with respect to every variable that it depends on, and add the gradients to the
        variables' `.grad`.

        The backward pass frees each saved tensor after its last use, unless `retain_graph` is True.

        Args:
            gradient: the gradient of the loss with respect to this tensor, in this tensor's shape. It may be left out
                if this tensor has one element, which is then the loss itself.
            retain_graph: whether the graph can be differentiated again.

        Raises:
            ShapeError: if `gradient` has another shape, or is left out and this tensor does not have one element.
            AutogradError: if this tensor depends on no variable, if the graph was differentiated before, or if a
                variable was changed in place since it was used.
        """
    def broadcast_to(self, /, *shape: int | tuple[int, ...] | list[int]) -> Tensor:
        """
        Return a view of shape `shape`. The elements repeat along dimensions that have size 1 in this tensor, and along
        new leading dimensions.

        Raises:
            ShapeError: if this tensor's shape does not broadcast to `shape`, or a size is negative.
            OutOfMemoryError: if a tensor of shape `shape` without repeated elements would not fit into memory.
        """
    def chunk(self, /, chunks: SupportsIndex, dim: SupportsIndex = 0) -> list[Tensor]:
        """
        Split the tensor along `dim` into views. If this tensor has the size n along `dim`, each view has the size
        ceil(n / `chunks`). As in torch, the last view may be smaller, and there may be fewer than `chunks` views.

        Raises:
            ArgumentError: if `chunks` is less than 1.
            IndexOutOfRangeError: if the dimension is out of range.
        """
    def clamp(
        self,
        /,
        min: SupportsFloat | SupportsIndex | None = None,
        max: SupportsFloat | SupportsIndex | None = None,
    ) -> Tensor:
        """
        Limit each element to [min, max]; None means no limit. The gradient of elements outside of this range is 0.

        Raises:
            ArgumentError: if neither limit is given, a limit is NaN, or min > max.
            DTypeError: if the tensor is not floating point.
        """
    def contiguous(self, /) -> Tensor:
        """
        Return a tensor with the same values, whose elements are in memory in row-major order. The values are copied
        only if this tensor is not contiguous.
        """
    def cos(self, /) -> Tensor:
        """
        Return the cosine of each element.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def cumsum(self, /, dim: SupportsIndex) -> Tensor:
        """
        Return the cumulative sum along `dim`: element i of the result is the sum of the elements 0 to i, both included.

        Raises:
            IndexOutOfRangeError: if the dimension is out of range.
            DTypeError: if the tensor is not floating point.
        """
    def detach(self, /) -> Tensor:
        """
        Return a tensor with the same values (shared storage), detached from the tape.
        """
    @property
    def device(self, /) -> Device:
        """
        The device, such as "cpu" or "cuda:0".
        """
    @property
    def dtype(self, /) -> DType:
        """
        The dtype; compares equal to its names, such as "f32" and "float32".
        """
    def embedding(self, /, ids: Tensor) -> Tensor:
        """
        Look up the rows with the indices `ids` in this table (rows, width). If `ids` has the shape (...), the result is
        (..., width).

        Raises:
            IndexOutOfRangeError: if an index is negative, or not less than the number of rows.
            ShapeError: if the table is not a matrix.
            DTypeError: if `ids` is neither i64 nor u32.
            DeviceError: if `ids` is on another device.
        """
    def exp(self, /) -> Tensor:
        """
        Return e to the power of each element.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def expand(self, /, *shape: int | tuple[int, ...] | list[int]) -> Tensor:
        """
        Return the same as `broadcast_to`, but the size -1 means the size of this tensor's dimension, as in torch.

        Raises:
            ShapeError: if this tensor's shape does not broadcast to `shape`, a new leading dimension has the size -1,
                or a size is less than -1.
            OutOfMemoryError: as for `broadcast_to`.
        """
    def flatten(self, /, start_dim: SupportsIndex = 0, end_dim: SupportsIndex = -1) -> Tensor:
        """
        Merge the dimensions from `start_dim` to `end_dim`, both included, into one dimension. A tensor without
        dimensions becomes a vector of one element.

        Raises:
            ArgumentError: if `start_dim` comes after `end_dim`.
            IndexOutOfRangeError: if a dimension is out of range.
        """
    def float(self, /) -> Tensor:
        """
        Return a tensor with the same values in f32.
        """
    def gather(self, /, dim: SupportsIndex, index: Tensor) -> Tensor:
        """
        Select one element for each element of `index`, as torch's `gather` does. For a matrix and `dim=1`, this is
        `result[i, j] = self[i, index[i, j]]`. The result has the shape of `index`.

        Args:
            dim: the dimension along which `index` selects.
            index: i64 or u32, with as many dimensions as this tensor, and sizes of at most this tensor's except along
                `dim`. Negative indices are out of range.

        Raises:
            IndexOutOfRangeError: if an index or the dimension is out of range.
            ShapeError: if `index` has another number of dimensions or a larger size.
            DTypeError: if `index` is neither i64 nor u32.
            DeviceError: if `index` is on another device.
        """
    def gelu(self, /, approximate: str = "none") -> Tensor:
        """
        Apply GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415) to each element x.

        Args:
            approximate: "none" for x * Phi(x), where Phi is the standard normal distribution function, computed with
                the error function; "tanh" for the approximation of x * Phi(x) with tanh.

        Raises:
            ArgumentError: if `approximate` has another value.
            DTypeError: if the tensor is not floating point.
        """
    def index_select(self, /, dim: SupportsIndex, index: Tensor) -> Tensor:
        """
        Select the n slices with the indices `index` along `dim`, in the order of `index`. The result has the size n
        along `dim`.

        Args:
            dim: the dimension.
            index: (n,), i64 or u32. Negative indices are out of range.

        Raises:
            IndexOutOfRangeError: if an index or the dimension is out of range.
            ShapeError: if `index` does not have one dimension.
            DTypeError: if `index` is neither i64 nor u32.
            DeviceError: if `index` is on another device.
        """
    def is_contiguous(self, /) -> bool:
        """
        Return whether the elements are in memory in row-major order without gaps.
        """
    @property
    def is_leaf(self, /) -> bool:
        """
        Whether this is a variable or a constant, not the result of a recorded operation.
        """
    def item(self, /) -> Any:
        """
        Return the only element as a Python number.

        Raises:
            ShapeError: if there is not exactly one element.
            DeviceError: for a tensor on a GPU inside a function that is being captured (`tc.cuda.capture`).
        """
    def log(self, /) -> Tensor:
        """
        Return the natural logarithm of each element.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def log_softmax(self, /, dim: SupportsIndex = -1) -> Tensor:
        """
        Return the logarithm of `softmax`. It neither overflows nor underflows.

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
        Return the logarithm of the sum of exponentials, without overflow.

        Args:
            dim: the dimension or dimensions to reduce; default all.
            keepdim: whether the result keeps the reduced dimensions, with size 1.
            axis: another name of `dim`.

        Raises:
            IndexOutOfRangeError: if a dimension is out of range.
            ArgumentError: if a dimension is given twice, or both `dim` and `axis` are given.
           DTypeError: if the tensor is not floating point.
        """
    def make_var(self, /) -> Var:
        """
        Make a variable with a contiguous copy of this tensor's values, detached from the tape.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def matmul(self, /, other: Tensor | builtins.float | int) -> Tensor:
        """
        Return the matrix product (..., m, k) x (..., k, n) -> (..., m, n).

        Batch dimensions broadcast. As in numpy, a vector (k,) on the left counts as the matrix (1, k), a vector (k,) on
        the right as (k, 1), and the result does not have the added dimension of size 1.

        Raises:
            ShapeError: if an operand has no dimensions, the sizes k differ, or the batch dimensions do not broadcast.
            DTypeError: if the dtypes differ or are not floating point.
            DeviceError: if the operands are on different devices.
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
        Return the largest element. NaN counts as the largest. With one dimension in `dim`, the first of equal elements
        gets the gradient; with several dimensions or without `dim`, equal elements share the gradient equally.

        Args:
            dim: the dimension or dimensions to reduce; default all.
            keepdim: whether the result keeps the reduced dimensions, with size 1.
            axis: another name of `dim`.

        Raises:
            IndexOutOfRangeError: if a dimension is out of range.
            ArgumentError: if a dimension is given twice, or both `dim` and `axis` are given.
            ShapeError: if a reduced dimension has the size 0.
        """
    def maximum(self, /, other: Tensor | builtins.float | int) -> Tensor:
        """
        Return the larger of each pair of elements. Equal elements share the gradient equally.

        Raises:
            ShapeError: if the shapes do not broadcast.
            DTypeError: if `other` is an array of numpy or another library with another dtype.
            ArgumentError: if `other` is an integer outside the range of this tensor's dtype, or of f64 if the dtype is
                floating point.
            DeviceError: if the operands are on different devices.
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
        Return the mean.

        Args:
            dim: the dimension or dimensions to reduce; default all.
            keepdim: whether the result keeps the reduced dimensions, with size 1.
            axis: another name of `dim`.

        Raises:
            IndexOutOfRangeError: if a dimension is out of range.
            ArgumentError: if a dimension is given twice, or both `dim` and `axis` are given.
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
        Return the smallest element. NaN counts as the smallest. Equal elements get gradients as in `max`.

        Args:
            dim: the dimension or dimensions to reduce; default all.
            keepdim: whether the result keeps the reduced dimensions, with size 1.
            axis: another name of `dim`.

        Raises:
            IndexOutOfRangeError: if a dimension is out of range.
            ArgumentError: if a dimension is given twice, or both `dim` and `axis` are given.
            ShapeError: if a reduced dimension has the size 0.
        """
    def minimum(self, /, other: Tensor | builtins.float | int) -> Tensor:
        """
        Return the smaller of each pair of elements. Equal elements share the gradient equally.

        Raises:
            ShapeError: if the shapes do not broadcast.
            DTypeError: if `other` is an array of numpy or another library with another dtype.
            ArgumentError: if `other` is an integer outside the range of this tensor's dtype, or of f64 if the dtype is
                floating point.
            DeviceError: if the operands are on different devices.
        """
    def narrow(self, /, dim: SupportsIndex, start: SupportsIndex, length: SupportsIndex) -> Tensor:
        """
        Return a view of the `length` slices along `dim` from index `start` on.

        Raises:
            IndexOutOfRangeError: if `dim` is out of range, or `start + length` is more than the size of the dimension.
            ArgumentError: if `start` or `length` is negative.
        """
    @property
    def nbytes(self, /) -> int:
        """
        The number of bytes of all elements.
        """
    @property
    def ndim(self, /) -> int:
        """
        The number of dimensions.
        """
    def neg(self, /) -> Tensor:
        """
        Return the elements with the opposite sign.

        Raises:
            DTypeError: if the tensor is u8 or u32.
        """
    def numel(self, /) -> int:
        """
        Return the number of elements.
        """
    def numpy(self, /) -> NDArray[Any]:
        """
        Return a numpy array with a copy of the values. Gradients do not flow through the array.

        For a view without a copy (read-only), use `numpy.from_dlpack(t)`.

        Raises:
            DTypeError: for bf16, which numpy does not have; convert with `.to("f32")` first.
            DeviceError: for a tensor on a GPU inside a function that is being captured (`tc.cuda.capture`).
        """
    def permute(self, /, *dims: int | tuple[int, ...] | list[int]) -> Tensor:
        """
        Reorder the dimensions: dimension i of the result is dimension `dims[i]` of this tensor.

        Args:
            dims: the dimensions in the new order, as arguments or one sequence.

        Raises:
            ShapeError: if `dims` does not have all dimensions.
            ArgumentError: if a dimension is given twice.
            IndexOutOfRangeError: if a dimension is out of range.
        """
    def pow(self, /, exponent: Tensor | builtins.float | int) -> Tensor:
        """
        Raise each element to the power of `exponent`.

        Raises:
            ShapeError: if the shapes do not broadcast.
            DTypeError: if neither this tensor nor the exponent is floating point, or if the exponent is an array of
                numpy or another library with another dtype.
            ArgumentError: if the exponent is an integer outside the range of f64.
            DeviceError: if the operands are on different devices.
        """
    def reciprocal(self, /) -> Tensor:
        """
        Return one over each element.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def relu(self, /) -> Tensor:
        """
        Return max(x, 0) for each element x; NaN stays NaN.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    @property
    def requires_grad(self, /) -> bool:
        """
        Whether the tensor is a variable or depends on one. If so, backward passes compute the tensor's gradient.
        """
    def reshape(self, /, *shape: int | tuple[int, ...] | list[int]) -> Tensor:
        """
        Return the same elements, in row-major order, in another shape. The result is a view if this tensor is
        contiguous, and a copy otherwise.

        Args:
            shape: the sizes, as arguments or one sequence. One size may be -1: it is computed from the number of
                elements.

        Raises:
            ShapeError: if the tensor does not have as many elements as `shape`, or `shape` has a negative size other
                than one -1.
        """
    @property
    def shape(self, /) -> tuple[int, ...]:
        """
        The sizes of the dimensions.
        """
    def sigmoid(self, /) -> Tensor:
        """
        Return 1 / (1 + exp(-x)) for each element x.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def silu(self, /) -> Tensor:
        """
        Return x * sigmoid(x) for each element x.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def sin(self, /) -> Tensor:
        """
        Return the sine of each element.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def softmax(self, /, dim: SupportsIndex = -1) -> Tensor:
        """
        Return exp(x) / sum(exp(x)) for each element x, with the sum along `dim`. It does not overflow.

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
        Split the tensor along `dim` into views.

        Args:
            split_size_or_sections: one size along `dim` for all views (the last view may be smaller), or a list with
                the size of each view.
            dim: the dimension.

        Raises:
            ShapeError: if the sizes in the list do not add up to the size of the dimension.
            ArgumentError: if a size is negative, or the one size for all views is 0.
            IndexOutOfRangeError: if the dimension is out of range.
        """
    def sqrt(self, /) -> Tensor:
        """
        Return the square root of each element.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def square(self, /) -> Tensor:
        """
        Return the square of each element.

        Raises:
            DTypeError: if the tensor is not floating point.
        """
    def squeeze(self, /, dim: SupportsIndex | Sequence[SupportsIndex] | None = None) -> Tensor:
        """
        Remove the dimensions of size 1. If `dim` is given, remove only those of the dimensions in `dim`.

        Raises:
            IndexOutOfRangeError: if a dimension is out of range.
            ArgumentError: if a dimension is given twice.
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
        Return the sum. The sum of an integer tensor, such as a mask, is in i64.

        Args:
            dim: the dimension or dimensions to reduce; default all.
            keepdim: whether the result keeps the reduced dimensions, with size 1.
            axis: another name of `dim`.

        Raises:
            IndexOutOfRangeError: if a dimension is out of range.
            ArgumentError: if a dimension is given twice, or both `dim` and `axis` are given.
        """
    def tanh(self, /) -> Tensor:
        """
        Return the hyperbolic tangent of each element.

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
        Return a tensor with the same values in another dtype or on another device.

        Casts between floating point dtypes and copies to another device are differentiable. The gradient has this
        tensor's dtype and device.

        Args:
            target: a dtype ("bf16", "float32", tc.float16) or a device ("cpu", "cuda", "cuda:1").
            dtype: the dtype, by keyword.
            device: the device, by keyword.

        Raises:
            ArgumentError: if `target` and a keyword are two dtypes or two devices.
            DTypeError: if the dtype is unknown.
            DeviceError: if the device is unknown.
            CudaUnavailableError: if the device is a CUDA device and CUDA cannot be used. The message says why.
            OutOfMemoryError: if the result does not fit into memory.
        """
    def tolist(self, /) -> Any:
        """
        Return the elements as nested lists of Python numbers. A tensor without dimensions gives a number.

        Raises:
            DeviceError: for a tensor on a GPU inside a function that is being captured (`tc.cuda.capture`).
        """
    def transpose(self, /, dim0: SupportsIndex, dim1: SupportsIndex) -> Tensor:
        """
        Swap two dimensions.

        Raises:
            IndexOutOfRangeError: if a dimension is out of range.
        """
    def unsqueeze(self, /, dim: SupportsIndex) -> Tensor:
        """
        Insert a dimension of size 1. `dim` is the index of this dimension in the result.

        Raises:
            IndexOutOfRangeError: if `dim` is out of range.
        """
    def var(
        self,
        /,
        dim: SupportsIndex | Sequence[SupportsIndex] | None = None,
        keepdim: bool = False,
        *,
        correction: SupportsFloat | SupportsIndex = 1.0,
        unbiased: bool | None = None,
        axis: SupportsIndex | Sequence[SupportsIndex] | None = None,
    ) -> Tensor:
        """
        Return the variance: the sum of the squared deviations from the mean, divided by n - `correction`, where n is
        the number of elements in the sum.

        Args:
            dim: the dimension or dimensions to reduce; default all.
            keepdim: whether the result keeps the reduced dimensions, with size 1.
            correction: 1 for the unbiased estimate (torch's default), 0 for numpy's default.
            unbiased: if given, it replaces `correction`: True means 1, False means 0.
            axis: another name of `dim`.

        Raises:
            IndexOutOfRangeError: if a dimension is out of range.
            ArgumentError: if a dimension is given twice, or both `dim` and `axis` are given.
            DTypeError: if the tensor is not floating point.
        """
    def view(self, /, *shape: int | tuple[int, ...] | list[int]) -> Tensor:
        """
        Another name of `reshape`, as in torch. Unlike in torch, the result may be a copy.
        """

@final
class TextFeatures:
    """
    The features that CLIP's text encoder computes for B texts of S tokens each. D is the encoder's hidden size.

    ```python
    encoder = tc.models.CLIPTextModel.from_pretrained("sdxl", subfolder="text_encoder")
    features = encoder(tc.tensor([[1, 2, 3]]))
    assert features.last_hidden_state.shape[:2] == features.skipped(1).shape[:2]
    ```
    """
    @property
    def hidden_states(self, /) -> list[Tensor]:
        """
        The hidden states after the embedding and after each layer, before the final norm, (B, S, D) each.
        """
    @property
    def last_hidden_state(self, /) -> Tensor:
        """
        The hidden states after the last layer and the final norm, (B, S, D).
        """
    @property
    def penultimate(self, /) -> Tensor:
        """
        The hidden states before the last layer, (B, S, D), which SDXL uses.
        """
    @property
    def pooled(self, /) -> Tensor:
        """
        The pooled states, (B, D): for each text, the state of its end token in `last_hidden_state`. If the model has a
        projection, these states are projected to P features, (B, P).
        """
    def skipped(self, /, clip_skip: SupportsIndex) -> Tensor:
        """
        Return the hidden states `clip_skip` layers before `penultimate`, (B, S, D). diffusers' SDXL pipelines count
        `clip_skip` in the same way.

        Raises:
            ArgumentError: if `clip_skip` is negative or not less than the model's number of layers.
        """

@final
class TrainingAdapter:
    """
    A frozen LoRA that `add_training_adapter` puts on a model, in addition to the adapter that is trained. Such LoRAs
    are published for distilled models, for use in training only.

    ```python
    unet = tc.models.load("sdxl")
    frozen = unet.add_training_adapter("adapter.safetensors")
    adapter = unet.add_adapter(tc.LoraConfig(r=4))  # the adapter that is trained
    frozen.set_enabled(False)  # such as for a preview
    ```
    """
    def __len__(self, /) -> int:
        """
        Return the number of layers to which the training adapter was added. `remove` does not change this number.
        """
    def numel(self, /) -> int:
        """
        Return the number of elements of all factors of the training adapter.
        """
    def remove(self, /) -> None:
        """
        Remove the training adapter from the model.
        """
    def set_enabled(self, /, enabled: bool) -> None:
        """
        Set whether the model computes with the training adapter. While it is disabled, the model computes exactly what
        it would compute without the training adapter.
        """

@final
class Var(VarMethods, Tensor):
    """
    A trainable variable: a tensor with its own storage that accumulates a gradient and can be set to new values.

    A `Var` is a `Tensor`. After the values of a `Var` have changed, a backward pass that needs the old values raises an
    error instead of computing a wrong gradient.

    ```python
    v = tc.Var([1.0, 2.0, 3.0])
    (v * v).sum().backward()
    assert v.grad.tolist() == [2.0, 4.0, 6.0]
    v.set(v.detach() - 0.1 * v.grad)
    ```

    Args:
        data: a tensor or anything else that `tensor` takes. The values are copied and detached from the tape.
        dtype: a floating point dtype; default: the dtype that `tensor` gives the data.
        device: the device; default: the device of `data` if it is a tensor, otherwise the CPU.

    Raises:
        DTypeError: if the variable's dtype would not be floating point.
        The other errors of `tensor`.
    """
    def __new__(
        cls, /, data: Any, dtype: DType | str | None = None, device: str | None = None
    ) -> Var: ...
    def _replace(self, /) -> None:
        """
        Record that a copy has taken the place of this variable, for example on another device. A step of an optimizer
        that still has this variable then raises an error.
        """
    @property
    def grad(self, /) -> Tensor | None:
        """
        The accumulated gradient, or None. Assigning a tensor replaces the gradient by a copy of the tensor; assigning
        None clears the gradient.

        Raises:
            ShapeError, DTypeError, DeviceError: on assignment, if the tensor differs from the variable in shape, dtype
                or device.
            OutOfMemoryError: if a copy of the gradient does not fit in memory. Reading makes a copy only if the
                gradient is in a flat buffer, which holds the gradients of several adapter parameters together.
        """
    @grad.setter
    def grad(self, /, grad: Tensor | None) -> None: ...
    def set(self, /, value: Tensor) -> None:
        """
        Overwrite the values of the variable in place.

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
        Predict the velocity from noise to clean latents (latents minus noise) for noisy latents.

        Args:
            hidden_states: noisy latents of B samples, (B, in_channels, h, w), shifted and scaled by the autoencoder's
                `shift_factor` and `scaling_factor`; h and w must be even.
            encoder_hidden_states: the text encoder's results for the L text tokens, (B, L, cap_feat_dim).
            timestep: the time, (B,), (1,), or a number, from 0 (pure noise) to 1 (clean latents). Other flow models
                count the time in the opposite direction, and predict noise minus latents.
            lengths: the number of tokens of each text without its padding, (B,), at least 1. The model replaces the
                padding tokens after them by its own. Default: no text has padding.
            rows_are_full: True asserts that the length of every text, rounded up to a multiple of 32, equals L rounded
                up to a multiple of 32. Then attention needs no mask, which saves time. The model does not check this.

        Returns:
            A tensor of the shape of `hidden_states`, in the dtype of the weights.

        Raises:
            ShapeError: if the inputs do not fit the model or one another.
            DTypeError: if `hidden_states` is not floating point.
        """

def adapted_parts(path: str | bytes | PathLike[str] | PathLike[bytes], model: str) -> list[str]:
    """
    Return the parts of a family for which an adapter file has adapters, by the names of their folders in a pipeline.

    Args:
        path: the adapter file, or the folder that peft writes.
        model: the family, such as "sdxl".

    Raises:
        MissingFileError: if there is no such file.
        WeightsFormatError: if the file is damaged.
        ConfigError: if there is no such family.
    """

def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: SupportsIndex | Sequence[SupportsIndex],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: SupportsFloat | SupportsIndex = 1e-5,
) -> tuple[Tensor, Tensor]:
    """
    Compute input + residual and the `layer_norm` of this sum. A pre-norm transformer block needs the sum for its
    residual connection and the norm for its next layer. On CUDA, one kernel computes both.

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
        The sum and the normalised sum, both of the input's shape and dtype. The sum is rounded to this dtype before it
        is normalised.

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
    Return the numbers `start`, `start + step`, ... up to but not including `end`.

    ```python
    assert tc.arange(4).tolist() == [0, 1, 2, 3]
    assert tc.arange(1, 2, 0.5).tolist() == [1.0, 1.5]
    ```

    Args:
        start: the first value. If `end` is not given, `start` is the end, and the first value is 0.
        end: the end of the range, which is not one of the values.
        step: the difference between neighbouring values.
        dtype: the dtype; default i64 if all arguments are integers, else f32. The values are exact if all arguments are
            integers in the range of i64 and the dtype is i64; otherwise they are computed in f64 and then converted.
        device: the device.

    Raises:
        ArgumentError: if `step` is 0 or so small that f64 cannot represent the number of values, or if an argument is
            non-finite, a tensor or an array.
        DTypeError: if the dtype is unknown.
        DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
        OutOfMemoryError: if the values do not fit into memory.
    """

def available_bytes() -> int | None:
    """
    Return the number of bytes of host memory that can still be allocated; None if the system does not report it.

    ```python
    free = tc.memory.available_bytes()
    assert free is None or free > 0
    ```
    """

def cat(tensors: SupportsGetItem[int, Tensor], dim: SupportsIndex = 0) -> Tensor:
    """
    Concatenate tensors along `dim`. The sizes of all other dimensions must agree.

    ```python
    assert tc.cat([tc.zeros(2, 3), tc.ones(1, 3)]).shape == (3, 3)
    ```

    Raises:
        ArgumentError: if there are no tensors.
        ShapeError: if the numbers of dimensions differ, or the sizes of another dimension than `dim`.
        DTypeError: if the dtypes differ.
        IndexOutOfRangeError: if the dimension is out of range.
        OutOfMemoryError: if the result does not fit into memory.
    """

def checkpoint(function: Callable[..., Any], *tensors: Tensor, policy: str = "full") -> Any:
    """
    Run `function(*tensors)` and save only the intermediate results that `policy` names. The backward pass calls the
    function again to recompute the other intermediate results.

    The second call must compute the same as the first. It gets the same random numbers, so that dropout has the same
    mask. Variables that the function captures get their gradients.

    ```python
    layer = tc.nn.Linear(4, 4)
    y = tc.checkpoint(lambda x: F.gelu(layer(x)), tc.randn(2, 4))
    y.sum().backward()  # computes the layer again
    ```

    Args:
        function: takes `tensors` as its arguments, returns a Tensor, or a tuple or list of Tensors.
        tensors: the arguments of the function. The function must capture all other values that it needs.
        policy: "full" saves only `tensors`. "selective" also saves the results of matrix products and attention, so
            that only cheap operations are recomputed. "none" saves everything. "offload" saves the same as "full", and
            keeps large tensors in host memory until the backward pass.

    Returns:
        The function's Tensor, or a tuple of its Tensors.

    Raises:
        ArgumentError: if an argument or a result is not a Tensor, or the policy is unknown.
        The exceptions of the function.
    """

def choices() -> dict[str, list[str]]:
    """
    Return the names that each of the options "adapter", "format", "model", "optimizer" and "qat" accepts. Those of
    "optimizer" are names of classes in lower case.
    """

def classifier_free_guidance(
    negative: Tensor, positive: Tensor, scale: SupportsFloat | SupportsIndex
) -> Tensor:
    """
    Apply classifier-free guidance (arXiv:2207.12598): move a model's output for the prompt away from its output for a
    negative prompt.

    ```python
    negative, positive = tc.zeros(2), tc.ones(2)
    assert tc.train.classifier_free_guidance(negative, positive, 7.0).tolist() == [7.0, 7.0]
    ```

    Args:
        negative: the model's output for the negative prompt.
        positive: the model's output for the prompt.
        scale: the guidance scale; a scale of 1 gives `positive`, up to rounding.

    Returns:
        `negative + scale * (positive - negative)`.

    Raises:
        ShapeError: if the shapes of the two outputs do not broadcast.
        DTypeError, DeviceError: if the two outputs have different dtypes, or are on different devices.
    """

def clip_grad_norm_(
    parameters: Iterable[Var] | Mapping[str, Var],
    max_norm: SupportsFloat | SupportsIndex,
    norm_type: SupportsFloat | SupportsIndex = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """
    Scale the gradients of `parameters` so that the norm of all these gradients together is at most `max_norm`, as
    `torch.nn.utils.clip_grad_norm_` does.

    ```python
    loss.backward()
    norm = tc.optim.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    ```

    Args:
        parameters: the variables; those without a gradient are ignored.
        max_norm: the largest norm after scaling, at least 0. If it is infinite, finite gradients do not change.
        norm_type: 2 for the root of the sum of squares, infinity for the largest magnitude of an element.
        error_if_nonfinite: whether a non-finite norm raises an error instead of making the gradients zero or NaN. On a
            CUDA device, this check waits for all pending work of the device.

    Returns:
        The norm before scaling: a scalar in f64 on the device of the gradients. On a CUDA device, reading the scalar's
        value waits for all pending work of the device.

    Raises:
        ArgumentError: if `max_norm` or `norm_type` is out of range, or `parameters` is a single tensor or has an item
            that is not a Var.
        DeviceError: if the gradients are on different devices.
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
    Apply a two-dimensional convolution.

    In the shapes, B is the number of images, C and O the numbers of their channels and of the result's, H and W their
    height and width, OH and OW those of the result, and KH and KW those of the kernel.

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
        channels_last: whether the layouts are input (B, H, W, C), weight (O, KH, KW, C / groups) and result
            (B, OH, OW, O). Operands in these layouts need not be copied.

    Returns:
        (B, O, OH, OW); (B, OH, OW, O) with `channels_last`.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit, or if the kernel is larger than the padded
            images.
        ArgumentError: if a stride, a dilation or the number of groups is less than 1, or a padding is negative.
        OutOfMemoryError: if the result does not fit into memory.
    """

def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: SupportsIndex = -100,
    reduction: str = "mean",
    label_smoothing: SupportsFloat | SupportsIndex = 0.0,
) -> Tensor:
    """
    Compute the cross-entropy of logits and class ids. Unlike in torch, the classes are always the last dimension of the
    logits.

    ```python
    loss = F.cross_entropy(tc.randn(4, 10), tc.tensor([1, 2, 3, -100]), label_smoothing=0.1)
    ```

    Args:
        input: logits, (..., classes): one row of logits for each target.
        target: class ids, (...), i64 or u32.
        ignore_index: rows with this target have the loss 0 and no gradient.
        reduction: "mean" (over the rows that are not ignored; NaN if all are), "sum", or "none" for the losses of the
            rows.
        label_smoothing: the fraction of each target's probability that is spread evenly over all classes, in [0, 1].

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
        IndexOutOfRangeError: if a target is not a class. On CUDA, the next call that reads a value or waits for the
            device raises this error.
        ArgumentError: if the reduction is unknown or `label_smoothing` is out of range.
    """

def cuda_bus_id(device: str) -> str:
    """
    Return the address of a CUDA device on the PCI bus. It names the device in all processes of the machine.

    Raises:
        DeviceError: if `device` is not a CUDA device or the driver reports an error.
        CudaUnavailableError: if CUDA cannot be used.
    """

def cuda_device_count() -> int:
    """
    Return the number of CUDA devices.

    Raises:
        CudaUnavailableError: if CUDA cannot be used.
    """

def cuda_device_name(device: str) -> str:
    """
    Return the product name of a CUDA device, such as "NVIDIA A100-SXM4-80GB".

    Raises:
        DeviceError: if `device` is not a CUDA device or the driver reports an error.
        CudaUnavailableError: if CUDA cannot be used.
    """

def cuda_empty_cache(device: str) -> int:
    """
    Release the cached memory of a CUDA device to other processes; return the number of bytes released.

    Raises:
        DeviceError: if `device` is not a CUDA device or the driver reports an error.
        CudaUnavailableError: if CUDA cannot be used.
    """

def cuda_finish_profile() -> list[tuple[str, int, float]]:
    """
    Stop measuring, and wait for the device. Return (name, number of launches, total milliseconds) for each kernel that
    was launched since `cuda_start_profile`, the longest total first. CUDA graphs and copies are not measured.

    Raises:
        ArgumentError: if no launches are being measured.
        DeviceError: if a kernel failed.
    """

def cuda_link(device: str, bus_id: str) -> str | None:
    """
    Return how `device` reads the memory of the device with the address `bus_id` on the PCI bus: "nvlink", "bus" (the
    PCI bus), or "none" if `device` cannot read that memory. Return None if this process does not see the device at
    `bus_id`, or if that is `device` itself.

    Raises:
        DeviceError: if `device` is not a CUDA device or the driver reports an error.
        CudaUnavailableError: if CUDA cannot be used.
    """

def cuda_memory_stats(device: str) -> list[int]:
    """
    Return memory statistics of a CUDA device: ten numbers, in this order. Numbers 0 to 7 count this process alone.

    0. Allocated bytes.
    1. Peak of the allocated bytes.
    2. Reserved bytes.
    3. Peak of the reserved bytes.
    4. The part of the reserved bytes that captured graphs keep.
    5. How often tensors and workspaces allocated memory.
    6. How often memory of the device was reserved.
    7. How often memory ran out and cached memory was released.
    8. Bytes of the device that are free for any process.
    9. All bytes of the device.

    Raises:
        DeviceError: if `device` is not a CUDA device or the driver reports an error.
        CudaUnavailableError: if CUDA cannot be used.
    """

def cuda_pinnable_bytes(device: str, wanted: SupportsIndex) -> int:
    """
    Return how many of `wanted` bytes of pinned memory this process can allocate now, by allocating and freeing them.

    Raises:
        DeviceError: if `device` is not a CUDA device or the driver reports an error.
        CudaUnavailableError: if CUDA cannot be used.
    """

def cuda_reset_peak_memory_stats(device: str) -> None:
    """
    Set the memory peaks of a CUDA device to the bytes that are allocated and reserved now.

    Raises:
        DeviceError: if `device` is not a CUDA device or the driver reports an error.
        CudaUnavailableError: if CUDA cannot be used.
    """

def cuda_set_memory_limit(device: str, limit: SupportsIndex | None) -> None:
    """
    Limit the bytes of a CUDA device's memory that tensors and workspaces of this process may take; None removes the
    limit.

    Raises:
        DeviceError: if `device` is not a CUDA device.
        CudaUnavailableError: if CUDA cannot be used.
    """

def cuda_stages_weights(device: str) -> bool:
    """
    Return whether some of a device's streamed weights (weights in host memory, copied to the device before each use)
    are in host memory that is not pinned, because the system provides too little pinned memory. CUDA graphs cannot copy
    weights from memory that is not pinned. For the CPU, return False.

    Raises:
        DeviceError: if there is no such device.
        CudaUnavailableError: if CUDA cannot be used.
    """

def cuda_start_profile(device: str) -> None:
    """
    Measure the time of every kernel launch on a CUDA device from now on.

    Raises:
        DeviceError: if `device` is not a CUDA device.
        CudaUnavailableError: if CUDA cannot be used.
        ArgumentError: if launches are already being measured.
    """

def cuda_synchronize(device: str) -> None:
    """
    Wait until all work queued on a CUDA device is done.

    Raises:
        DeviceError: if `device` is not a CUDA device or a kernel failed.
        CudaUnavailableError: if CUDA cannot be used.
        IndexOutOfRangeError: if a kernel has found an index out of range.
    """

def cuda_unavailable_reason() -> str | None:
    """
    Return why CUDA cannot be used, or None if it can.
    """

def draw_from(seed: SupportsIndex, function: Callable[..., Any]) -> Any:
    """
    Call `function` with a separate generator in place of the library's generator. The separate generator gives the same
    random numbers as the library's generator after `manual_seed(seed)`. The state of the library's generator does not
    change.

    Args:
        seed: the seed of the separate generator, 0 to 2**64 - 1.
        function: a function without arguments.

    Returns:
        The result of `function`.

    Raises:
        ArgumentError: if the seed is out of range.
        The exceptions of the function.
    """

def dropout(input: Tensor, p: SupportsFloat | SupportsIndex = 0.5, training: bool = True) -> Tensor:
    """
    Zero each element with probability `p` and multiply the other elements by 1 / (1 - p) (Srivastava et al. 2014).

    ```python
    x = tc.ones(1000)
    assert set(F.dropout(x, 0.5).tolist()) == {0.0, 2.0}
    assert F.dropout(x, 0.5, training=False).tolist() == x.tolist()
    ```

    Args:
        input: any shape.
        p: the probability of zeroing an element, in [0, 1].
        training: whether elements are dropped. If False, the result is the input.

    Raises:
        ArgumentError: if `p` is out of range.
        DTypeError: if elements are to be dropped and the input is not floating point.
    """

def embedding(input: Tensor, weight: Tensor) -> Tensor:
    """
    Return the rows of the table `weight` at the indices `input`.

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
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
    """

def empty_like(
    input: Tensor, dtype: DType | str | None = None, device: str | None = None
) -> Tensor:
    """
    Make a tensor of unspecified values in the shape of `input`, for callers that do not read the values. By default it
    has the dtype and the device of `input`.

    ```python
    x = tc.tensor([1, 2, 3])
    assert tc.empty_like(x, dtype="f32").shape == x.shape
    ```

    Raises:
        DTypeError: if the dtype is unknown.
        DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
        OutOfMemoryError: if the tensor does not fit into memory.
    """

def eye(
    n: SupportsIndex,
    m: SupportsIndex | None = None,
    dtype: DType | str | None = None,
    device: str = "cpu",
) -> Tensor:
    """
    Make the identity matrix (n, m): ones on the diagonal, zeros elsewhere.

    ```python
    assert tc.eye(2).tolist() == [[1.0, 0.0], [0.0, 1.0]]
    ```

    Args:
        n: the number of rows.
        m: the number of columns; default `n`.
        dtype: the dtype; default f32.
        device: the device.

    Raises:
        ArgumentError: if `n` or `m` is negative.
        DTypeError: if the dtype is unknown.
        DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
        OutOfMemoryError: if the tensor does not fit into memory.
    """

def fake_quantize(input: Tensor, format: str, factors: Tensor | None = None) -> Tensor:
    """
    Round a matrix to the values that an 8-bit or 4-bit format can represent: products of a scale and a code (one of the
    format's numbers). An element that would round to a number beyond the first or the last code is clipped to this
    code.

    The backward pass is the straight-through estimator: the gradient of an element is the gradient of its rounded
    value, or 0 if the element is clipped. The backward pass treats scales as constants. `factors` get the gradient of
    LSQ, equation 3 (<https://arxiv.org/abs/1902.08153>). LSQ, unlike this function, also clips elements that lie beyond
    the last code and round to it.

    ```python
    weight = tc.Var(tc.randn(64, 64))
    y = F.linear(tc.randn(2, 64), F.fake_quantize(weight, "int8"))
    y.sum().backward()  # the weight gets the gradient of the rounded weight, except for clipped elements
    ```

    Args:
        input: floating point, (out_features, in_features).
        format: "int8" or "fp8" rounds as `quantize` followed by `dequantize` does. "nf4" does the same, but keeps
            scales in f32. "int4" is the format of torchao's symmetric weights: integers from -8 to 7, with one scale
            for each 32 elements of a row.
        factors: one factor for each scale, row after row; each scale is multiplied by its factor.

    Returns:
        The rounded matrix, in the shape and dtype of the input.

    Raises:
        ShapeError: if the input is not a matrix, if it does not divide into the groups of elements that share a scale
            ("int4": 32 elements of a row; "nf4": 64 elements of the matrix), or if the number of factors differs from
            the number of scales.
        DTypeError: if the input is not floating point.
        ArgumentError: if the format is unknown.
    """

def from_dlpack(data: Any) -> Tensor:
    """
    Make a tensor with a copy of the values of another library's array, on the device of the values.

    ```python
    assert tc.from_dlpack(np.array([1.0, 2.0])).tolist() == [1.0, 2.0]
    ```

    Args:
        data: an object with `__dlpack__`, or a DLPack capsule.

    Raises:
        DeviceError: if the values are neither on the CPU nor on a CUDA device.
        CudaUnavailableError: if the values are on a CUDA device and CUDA cannot be used.
        DTypeError: if no dtype can represent the values. On a CUDA device, also for int8, int16, int32 and uint16.
        ShapeError: if the values are on a CUDA device and a stride is negative.
        ArgumentError: if `data` has no `__dlpack__` and is no capsule, or if the capsule has no tensor or was used
            before.
        OutOfMemoryError: if the copy does not fit into memory.
        The exceptions of the producer.
    """

def full(
    shape: SupportsIndex | Sequence[SupportsIndex],
    value: Tensor | float | int,
    dtype: DType | str | None = None,
    device: str = "cpu",
) -> Tensor:
    """
    Make a tensor whose elements all have the value `value`.

    Args:
        shape: the sizes of the dimensions.
        value: a number, or a tensor or an array of one element.
        dtype: the dtype; default f32 for a float and i64 for an integer.
        device: the device.

    Raises:
        DTypeError: if the dtype is unknown, or it is an integer dtype and the value is a float.
        ArgumentError: if the value is an integer outside the range of an integer dtype, or of f64 if the dtype is
            floating point.
        ShapeError: if a size is negative, or `value` is a tensor or an array that does not have exactly one element.
        DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
        OutOfMemoryError: if the tensor does not fit into memory.
    """

def geglu(input: Tensor) -> Tensor:
    """
    Compute `h * gelu(gate)`, where h is the first half of the last dimension and gate the second (Shazeer 2020,
    arXiv:2002.05202).

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
    Return the precision of products of f32 matrices on CUDA devices, "highest" or "high"; see
    `set_float32_matmul_precision`.

    ```python
    tc.set_float32_matmul_precision("high")
    assert tc.get_float32_matmul_precision() == "high"
    tc.set_float32_matmul_precision("highest")
    ```
    """

def get_num_threads() -> int:
    """
    Return the number of threads that compute on the CPU.

    ```python
    before = tc.get_num_threads()
    tc.set_num_threads(1)
    tc.set_num_threads(before)
    ```
    """

def get_rng_state() -> tuple[int, int]:
    """
    Return the state of the library's generator: (seed, position in the sequence of random numbers of this seed). After
    `set_rng_state(state)`, the generator repeats the random numbers that followed this state.

    ```python
    state = tc.get_rng_state()
    drawn = tc.randn(3)
    tc.set_rng_state(state)
    assert tc.randn(3).tolist() == drawn.tolist()
    ```
    """

def get_w8a8() -> bool:
    """
    Return whether linear layers with int8 or fp8 weights multiply the weights' 8-bit codes; see `set_w8a8`.
    """

def gguf_facts(path: str | bytes | PathLike[str] | PathLike[bytes]) -> dict[str, Any] | None:
    """
    Return what the header of a GGUF file says about its model, under GGUF's names; None for a file of another format.

    Raises:
        MissingFileError: if there is no such file.
        WeightsFormatError: if the file is damaged.
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
        gradient: the gradient with respect to `loss`, in the same shape. Default: 1, for a `loss` with one element.
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
    eps: SupportsFloat | SupportsIndex = 1e-6,
    atol: SupportsFloat | SupportsIndex = 1e-5,
    rtol: SupportsFloat | SupportsIndex = 1e-3,
) -> bool:
    """
    Check the gradient of `function` at `inputs` against central differences in f64:
    `|analytic - numeric| <= atol + rtol * |numeric|` for every entry.

    ```python
    assert tc.gradcheck(lambda x: x.tanh() * x, tc.randn(3, dtype="f64"))
    ```

    Args:
        function: takes the inputs, returns a Tensor of any shape.
        inputs: an f64 tensor, or a sequence of f64 tensors.
        eps: the step of the central differences: each entry is changed by +eps and by -eps.
        atol: absolute tolerance.
        rtol: relative tolerance.

    Returns:
        True.

    Raises:
        AutogradError: if an analytic gradient differs from the numeric one by more than the tolerance (the message
            names the entry that exceeds the tolerance most), or if the result depends on no input.
        ArgumentError: if the function does not return one Tensor.
        DTypeError: if an input is not f64.
        The exceptions of the function.
    """

def gradient_vectors(parameters: Iterable[Var] | Mapping[str, Var]) -> list[Tensor]:
    """
    Return copies of the gradients of variables, as vectors. Gradients that are adjacent in a flat buffer are one
    vector. Missing gradients are zeros.

    Raises:
        OutOfMemoryError: if the vectors do not fit into memory.
    """

def group_norm(
    input: Tensor,
    num_groups: SupportsIndex,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: SupportsFloat | SupportsIndex = 1e-5,
    *,
    channels_last: bool = False,
) -> Tensor:
    """
    Apply group normalisation (Wu & He 2018, arXiv:1803.08494).

    ```python
    assert F.group_norm(tc.randn(1, 8, 4, 4), 2).shape == (1, 8, 4, 4)
    ```

    Args:
        input: B samples of C channels, (B, C, ...).
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
    eps: SupportsFloat | SupportsIndex = 1e-5,
    *,
    channels_last: bool = False,
) -> Tensor:
    """
    Compute `silu(group_norm(input, ...))` in one operation. The tape does not save the result of `group_norm`.

    ```python
    assert F.group_norm_silu(tc.randn(1, 8, 4, 4), 2).shape == (1, 8, 4, 4)
    ```

    Args:
        input: B samples of C channels, (B, C, ...).
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
    delta: SupportsFloat | SupportsIndex = 1.0,
) -> Tensor:
    """
    Compute the Huber loss (Huber 1964) of the differences d = input - target: d² / 2 if |d| <= delta, otherwise
    delta * (|d| - delta / 2). By default, the result is the mean over all elements.

    ```python
    loss = F.huber_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]))
    each = F.huber_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]), reduction="none")
    assert loss.item() == each.mean().item()
    ```

    Args:
        input: a tensor of any shape.
        target: of the input's shape and dtype.
        reduction: "mean", "sum", or "none" for the losses of the elements.
        delta: the magnitude of the difference from which the loss is linear, above 0.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
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
    Draw the initial parameters of a linear layer: weight (out_features, in_features) and bias (out_features,), or None
    instead of the bias if `bias` is False. As in torch, both are drawn uniformly between -1 / sqrt(in_features) and
    1 / sqrt(in_features). Their dtype is f32 by default.

    Raises:
        ArgumentError: if a number of features is negative.
        DTypeError: if the dtype is not floating point.
        DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
        OutOfMemoryError: if the parameters do not fit into memory.
    """

def inspect(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    model: str | None = None,
    others: SupportsGetItem[int, str | bytes | PathLike[str] | PathLike[bytes]] = ...,
) -> CheckpointFacts:
    """
    Determine the contents of a checkpoint from its headers and configurations, without reading weights.

    ```python
    assert tc.inspect("sdxl").resolution == 128  # the built-in model
    ```

    Args:
        path: a pipeline's folder, an original checkpoint in one file, or the folder or file of a single model.
        model: the family, such as "sdxl". With a family, `path` and `others` together must have all models of the
            family.
        others: folders and files of single text encoders and autoencoders, which replace those at `path`.

    Raises:
        MissingFileError: if nothing is at `path` or at one of `others`.
        WeightsFormatError: if a file is damaged, if a model of the family is missing, or if `path` is of another
            family.
        ConfigError: if a configuration is wrong, or there is no such family.
    """

def is_grad_enabled() -> bool:
    """
    Return whether operations of this thread are recorded on the tape.

    ```python
    with tc.no_grad():
        assert not tc.is_grad_enabled()
    ```
    """

def l1_loss(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """
    Compute the absolute error |input - target|; by default, its mean over all elements.

    ```python
    loss = F.l1_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]))
    each = F.l1_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]), reduction="none")
    assert loss.item() == each.mean().item()
    ```

    Args:
        input: a tensor of any shape.
        target: of the input's shape and dtype.
        reduction: "mean", "sum", or "none" for the losses of the elements.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
        ArgumentError: if the reduction is unknown.
    """

def layer_norm(
    input: Tensor,
    normalized_shape: SupportsIndex | Sequence[SupportsIndex],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: SupportsFloat | SupportsIndex = 1e-5,
) -> Tensor:
    """
    Apply layer normalisation (Ba et al. 2016, arXiv:1607.06450) over the trailing dimensions `normalized_shape`.

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
    Compute `input @ weight.T + bias`.

    ```python
    y = F.linear(tc.randn(3, 4), tc.randn(2, 4), tc.zeros(2))
    assert y.shape == (3, 2)
    ```

    Args:
        input: (..., in_features).
        weight: (out_features, in_features), or a quantized matrix that `quantize` returned. A quantized matrix gets no
            gradient. The tape saves the input for the backward pass only if the weight needs a gradient.
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
    Compute the sum of the cross-entropies of the logits `input @ weight.T` and the class ids `target`: a scalar in f32
    (f64 for f64 input). The forward pass computes the logits of some rows at a time, so that the matrix of all logits
    never exists. It also computes the gradients, which the backward pass only multiplies by a number.

    ```python
    states, head, ids = tc.randn(3, 8), tc.randn(100, 8), tc.tensor([5, 7, -100])
    loss = F.linear_cross_entropy(states, head, ids)
    assert tc.allclose(loss, F.cross_entropy(states @ head.T, ids, reduction="sum"), rtol=1e-4)
    ```

    Args:
        input: N rows of D features, (N, D).
        weight: (classes, D), in the dtype of the input. The gradient of a frozen weight is not computed.
        target: class ids, (N,), i64 or u32; rows with -100 are ignored.
        weights: the factors by which the rows' losses are multiplied, (N,), f32 or f64. They get no gradient. Default:
            all 1.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
        IndexOutOfRangeError: if a target is not a class. On CUDA, the next call that reads a value or waits for the
            device raises this error.
        NoBackwardError: if `weights` needs a gradient.
    """

def linear_log_probs(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """
    Compute, for each row of `input`, the logarithm of the probability of its class id under the softmax of
    `input @ weight.T`: (N,), in f32 (f64 for f64 input). The logits are computed for some rows at a time, and again in
    the backward pass.

    ```python
    states, head = tc.randn(3, 8), tc.randn(100, 8)
    assert F.linear_log_probs(states, head, tc.tensor([5, 7, -100])).shape == (3,)
    ```

    Args:
        input: N rows of D features, (N, D).
        weight: (classes, D), in the dtype of the input.
        target: class ids, (N,), i64 or u32; rows with -100 give 0.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
        IndexOutOfRangeError: if a target is not a class. On CUDA, the next call that reads a value or waits for the
            device raises this error.
    """

def load_file(
    path: str | bytes | PathLike[str] | PathLike[bytes], device: str = "cpu"
) -> dict[str, Tensor]:
    """
    Read all tensors of a safetensors file.

    ```python
    tc.save_file({"a": tc.ones(2)}, "tensors.safetensors")
    assert tc.load_file("tensors.safetensors")["a"].tolist() == [1.0, 1.0]
    ```

    Args:
        path: the file.
        device: the device of the tensors.

    Returns:
        Tensors by name. fp8 tensors are converted to bf16, and bool tensors to u8.

    Raises:
        MissingFileError, FileError: if there is no such file, or it cannot be read.
        WeightsFormatError: if the file is not a complete safetensors file, or a tensor in it has a dtype that is not
            supported.
        DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
        OutOfMemoryError: if the tensors do not fit into memory.
    """

def lora_backward(
    grad_output: Tensor,
    input: Tensor,
    lora_down: Tensor,
    lora_up: Tensor,
    scale: SupportsFloat | SupportsIndex,
) -> tuple[Tensor, Tensor]:
    """
    Compute the gradients of `lora_down` and `lora_up`, the matrices in y = scale * (input @ lora_down.T) @ lora_up.T.

    ```python
    x, down, up = tc.randn(5, 8), tc.randn(2, 8), tc.randn(4, 2)
    grad_down, grad_up = tc.lora_backward(tc.ones(5, 4), x, down, up, 0.5)
    assert (grad_down.shape, grad_up.shape) == (down.shape, up.shape)
    ```

    Args:
        grad_output: (..., out_features), the gradient with respect to y.
        input: (..., in_features).
        lora_down: (rank, in_features), in the dtype of `input`, or in f32 if `input` is f16 or bf16.
        lora_up: (out_features, rank), in the dtype of `input`, or in f32 if `input` is f16 or bf16.
        scale: the factor `scale` in the formula.

    Returns:
        (grad_down, grad_up), in the shapes and dtypes of `lora_down` and `lora_up`.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
        ArgumentError: if the scale is not finite.
    """

def lora_backward_(
    grad_outputs: SupportsGetItem[int, Tensor],
    inputs: SupportsGetItem[int, Tensor],
    lora_downs: SupportsGetItem[int, Var],
    lora_ups: SupportsGetItem[int, Var],
    scale: SupportsFloat | SupportsIndex,
) -> None:
    """
    Compute `lora_backward` of many layers at once, and add the results to the `.grad` of the matrices. Gradients that
    are in a flat buffer change in place. On a CUDA device, many matrix products run in one launch, without
    synchronization.

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
        scale: the argument `scale` of `lora_backward`, the same for all layers.

    Raises:
        ArgumentError: if the lists have different lengths, or the scale is not finite.
        ShapeError, DTypeError, DeviceError: if the operands of a layer do not fit together. No gradient changes in this
            case.
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

    Raises:
        ArgumentError: if the seed is out of range.
    """

def memory_machine() -> str | None:
    """
    Return a name that identifies the machine, the process namespace and the user, or None if the system does not report
    them. Processes with equal names can share memory.
    """

def modulated_layer_norm(
    input: Tensor, scale: Tensor, shift: Tensor, eps: SupportsFloat | SupportsIndex = 1e-6
) -> Tensor:
    """
    Compute layer_norm(input) * (1 + scale) + shift, where layer_norm is over the last dimension. Each sample of the
    batch has its own scale and shift, as in adaLN of diffusion transformers (Peebles & Xie 2022, arXiv:2212.09748).

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
    Compute the squared error (input - target)²; by default, its mean over all elements.

    ```python
    loss = F.mse_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]))
    each = F.mse_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]), reduction="none")
    assert loss.item() == each.mean().item()
    ```

    Args:
        input: a tensor of any shape.
        target: of the input's shape and dtype.
        reduction: "mean", "sum", or "none" for the losses of the elements.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
        ArgumentError: if the reduction is unknown.
    """

def nccl_unique_id() -> bytes:
    """
    Return 128 bytes by which the processes of a group find each other. Only rank 0 may call this function; the other
    processes must get its bytes.

    Raises:
        CudaUnavailableError: if NCCL cannot be used.
        DeviceError: if NCCL cannot listen for the other processes.
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
    Draw standard normal values for the samples of a batch. Each sample has its own stream of random numbers, so a
    sample's values do not depend on the other samples of the batch.

    Args:
        shape: the shape of the values of one sample.
        samples: the numbers of the B samples, counted from 0 through the whole training run.
        seed: the seed of the run, 0 to 2**64 - 1.
        purpose: what the random numbers are for, such as "noise".

    Returns:
        (B, *shape), f32.

    Raises:
        ArgumentError: if the purpose is unknown, or a number is out of range.
    """

def ones(
    *shape: int | tuple[int, ...] | list[int], dtype: DType | str | None = None, device: str = "cpu"
) -> Tensor:
    """
    Make a tensor of ones.

    Args:
        shape: the sizes, as arguments or one sequence.
        dtype: the dtype; default f32.
        device: the device.

    Raises:
        ShapeError: if a size is negative.
        DTypeError: if the dtype is unknown.
        DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
        OutOfMemoryError: if the tensor does not fit into memory.
    """

def ones_like(input: Tensor, dtype: DType | str | None = None, device: str | None = None) -> Tensor:
    """
    Return ones in the shape of `input`. By default they have the dtype and the device of `input`.

    ```python
    x = tc.tensor([1, 2, 3])
    assert tc.ones_like(x, dtype="f32").shape == x.shape
    ```

    Raises:
        DTypeError: if the dtype is unknown.
        DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
        OutOfMemoryError: if the tensor does not fit into memory.
    """

def optimizer_kinds() -> list[tuple[str, str, int, dict[str, Any]]]:
    """
    Return the optimizers of the library's registry. Each is a tuple of its name, its docstring, the number of
    hyper-parameters that may be passed by position, and all hyper-parameters with their defaults, in the order of the
    constructor's parameters.
    """

def pipeline_parts(model: str) -> list[str]:
    """
    Return the names of the folders that the parts of a family have in a pipeline.

    Raises:
        ConfigError: if there is no such family.
    """

def prepare_adapters(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    adapters: SupportsGetItem[int, AdapterSet],
    format: str | None = None,
    metadata: dict[str, str] | None = None,
    dtype: DType | str | None = None,
) -> AdapterFile:
    """
    Copy to the CPU everything that `save_adapters` would write. Another thread can write the copy while training
    continues.

    ```python
    unet = tc.models.load("sdxl")
    adapter = unet.load_adapter("adapter.safetensors")
    file = tc.prepare_adapters("copy.safetensors", [adapter], dtype="bf16")
    file.write()  # in another thread, while training continues
    ```

    Args:
        path: the file; with the format "peft", also a folder, as in `AdapterSet.save`.
        adapters: the adapter set of each model.
        format: "kohya" (the default for SDXL), "diffusers", "comfyui", or "peft", which holds only one model. Default:
            as in `AdapterSet.save`, for the first model.
        metadata: entries (name: text) for the file's header, in addition to the entries that other tools read.
        dtype: the dtype of the parameters in the file, "f32", "f16" or "bf16". Default: f32.

    Raises:
        ArgumentError: if `adapters` is empty, if the format is unknown or cannot hold these adapters, if two models
            name a layer alike, if the dtype is not floating point, or if `path` is a folder and the format is not
            "peft".
    """

def quantize(tensor: Tensor, format: str) -> QuantizedTensor:
    """
    Quantize a frozen matrix.

    ```python
    weight = tc.randn(64, 128)
    quantized = tc.quantize(weight, "nf4")
    assert (quantized.dequantize() - weight).abs().mean().item() < 0.1
    ```

    Args:
        tensor: floating point, (out_features, in_features).
        format: "int8" for integers with a scale per row; "fp8" for e4m3 numbers with a scale per row; "nf4" for four
            bits as in bitsandbytes, with a scale per block of 64 elements, where each block of 256 scales is quantized
            too; "q8_0" or "q4_0" for blocks of 32 elements of a row, each block with a scale, as in GGUF files.

    Raises:
        ShapeError: if the tensor is not a matrix, or for "q8_0" and "q4_0", if a row does not consist of whole blocks.
        DTypeError: if the tensor is not floating point.
        ArgumentError: if the format is unknown or only `from_blocks` supports it, or if the tensor requires a gradient
            or has values that are non-finite or too large for the format.
    """

def quick_gelu(input: Tensor) -> Tensor:
    """
    Compute `input * sigmoid(1.702 * input)`: CLIP's approximation of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415).

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
    Draw random values, uniform in [0, 1), from the library's generator (see `manual_seed`).

    Args:
        shape: the sizes, as arguments or one sequence.
        dtype: a floating point dtype; default f32.
        device: the device.

    Raises:
        DTypeError: if the dtype is unknown or not floating point.
        ShapeError: if a size is negative.
        DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
        OutOfMemoryError: if the tensor does not fit into memory.
    """

def randint(
    low: SupportsIndex,
    high: SupportsIndex,
    shape: SupportsIndex | Sequence[SupportsIndex],
    device: str = "cpu",
) -> Tensor:
    """
    Draw random i64 integers, uniform in [low, high), from the library's generator (see `manual_seed`).

    Args:
        low: the smallest value.
        high: one more than the largest value.
        shape: the sizes of the dimensions.
        device: the device.

    Raises:
        ArgumentError: if `low` or `high` is outside the range of i64, or the range [low, high) is empty or has more
            than 2**32 - 1 values.
        ShapeError: if a size is negative.
        DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
        OutOfMemoryError: if the tensor does not fit into memory.
    """

def randn(
    *shape: int | tuple[int, ...] | list[int], dtype: DType | str | None = None, device: str = "cpu"
) -> Tensor:
    """
    Draw random values from the standard normal distribution, from the library's generator (see `manual_seed`).

    Args:
        shape: the sizes, as arguments or one sequence.
        dtype: a floating point dtype; default f32.
        device: the device.

    Raises:
        DTypeError: if the dtype is unknown or not floating point.
        ShapeError: if a size is negative.
        DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
        OutOfMemoryError: if the tensor does not fit into memory.
    """

def rms_norm(
    input: Tensor,
    normalized_shape: SupportsIndex | Sequence[SupportsIndex],
    weight: Tensor | None = None,
    eps: SupportsFloat | SupportsIndex = 1e-6,
) -> Tensor:
    """
    Apply root-mean-square normalisation (Zhang & Sennrich 2019, arXiv:1910.07467) of the last dimension.

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
        ArgumentError: if `eps` is negative or not finite, or `normalized_shape` has several dimensions.
    """

def rms_norm_rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    eps: SupportsFloat | SupportsIndex = 1e-6,
) -> Tensor:
    """
    Compute `rope(rms_norm(x, D, weight, eps), cos, sin, interleaved)` in one operation, for the queries and keys of
    Flux and Qwen3.

    ```python
    angles = tc.randn(16, 4)
    queries = F.rms_norm_rope(tc.randn(2, 16, 8), tc.ones(8), angles.cos(), angles.sin())
    assert queries.shape == (2, 16, 8)
    ```

    Args:
        x: S positions of D features, (..., S, D), D even.
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
    Apply rotary position embedding (Su et al. 2021, arXiv:2104.09864): rotate each pair of features by an angle.

    ```python
    angles = tc.arange(16.0).reshape(16, 1) * tc.tensor([1.0, 0.1, 0.01, 0.001])
    queries = F.rope(tc.randn(2, 16, 8), angles.cos(), angles.sin())
    assert queries.shape == (2, 16, 8)
    ```

    Args:
        x: (..., S, D): S positions, D features; D is even.
        cos: (S, D / 2), cosines of the angles.
        sin: (S, D / 2), sines of the angles.
        interleaved: whether pair i consists of features 2 * i and 2 * i + 1, instead of features i and i + D / 2.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
        NoBackwardError: if `cos` or `sin` needs a gradient.
    """

def save_adapters(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    adapters: SupportsGetItem[int, AdapterSet],
    format: str | None = None,
    metadata: dict[str, str] | None = None,
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
        path: the file; with the format "peft", also a folder, as in `AdapterSet.save`.
        adapters: the adapter set of each model.
        format: "kohya" (the default for SDXL), "diffusers", "comfyui", or "peft", which holds only one model. Default:
            as in `AdapterSet.save`, for the first model.
        metadata: entries (name: text) for the file's header, in addition to the entries that other tools read.
        dtype: the dtype of the parameters in the file, "f32", "f16" or "bf16". Default: f32.

    Returns:
        The names of layers whose adapter has no effect, as in `AdapterSet.save`.

    Raises:
        FileError: if the file cannot be written.
        ArgumentError: if `adapters` is empty, if the format is unknown or cannot hold these adapters, if two models
            name a layer alike, if the dtype is not floating point, or if `path` is a folder and the format is not
            "peft".
    """

def save_checkpoint(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    models: dict[str, Model],
    base: str | bytes | PathLike[str] | PathLike[bytes] | None = None,
    dtype: DType | str | None = None,
    quantize: dict[str, str] | None = None,
) -> None:
    """
    Write models to one file, with the tensor names of the original checkpoint. ComfyUI and other tools read such files.

    ```python
    unet = tc.models.SDXLUNet.from_pretrained("sdxl")
    tc.models.save_checkpoint("checkpoint.safetensors", {"unet": unet}, dtype="f16")
    ```

    Args:
        path: the file.
        models: the models, by the names of their folders in a pipeline, such as "unet", "transformer", "vae" or
            "text_encoder". Adapters are not written, but if an adapter is merged, the weight of its layer is the merged
            weight.
        base: the path of an original checkpoint. Its tensors that belong to none of `models` are copied unchanged.
        dtype: the floating point dtype to which the weights of `models` are converted. Default: each keeps its dtype.
        quantize: for each model to quantize, the format "fp8" or "int8", by the name of the model's folder. The linear
            layers of the model are written as ComfyUI stores them: "fp8" as e4m3 numbers with one scale per weight,
            "int8" as integers with one scale per row of the weight.

    Raises:
        ArgumentError: if a model does not fit the name of its folder, if only a part of a model's layers was loaded, if
            `quantize` names a model that is not in `models` or has no layers that may be quantized, or if a format is
            neither "fp8" nor "int8".
        DTypeError: if `dtype` is not floating point.
        FileError, MissingFileError: if a file cannot be written or read.
        WeightsFormatError: if `base` is damaged or has tensors of an unsupported dtype.
    """

def save_file(
    tensors: dict[str, Tensor],
    path: str | bytes | PathLike[str] | PathLike[bytes],
    metadata: dict[str, str] | None = None,
    codes: dict[str, str] | None = None,
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
        codes: the dtype in the file, "int8" or "fp8" (e4m3), of each u8 tensor that holds the codes of a
            QuantizedTensor, by the tensor's name.

    Raises:
        FileError: if the file cannot be written.
        ArgumentError: if a tensor has the name "__metadata__", if `tensors` has no tensor with a name in `codes`, or if
            a dtype in `codes` is neither "int8" nor "fp8".
        DTypeError: if a tensor of codes is not u8, or if safetensors files do not support the dtype of a tensor.
    """

def saved_bytes() -> int:
    """
    Return the number of bytes that existing tapes save for backward passes: activations and the inputs of checkpoints.
    A storage that several tensors share counts once. Parameters do not count.

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
    scale: SupportsFloat | SupportsIndex | None = None,
) -> Tensor:
    """
    Compute softmax(query @ key.T * scale + mask) @ value (Vaswani et al. 2017, arXiv:1706.03762). The matrix of scores
    is not stored, unless the mask needs a gradient.

    ```python
    q, k, v = (tc.randn(1, 2, 16, 8) for _ in range(3))  # one text, two heads, 16 tokens
    assert F.scaled_dot_product_attention(q, k, v, is_causal=True).shape == (1, 2, 16, 8)
    ```

    Args:
        query: (..., S, D): S queries of D features each.
        key: (..., L, D): L keys.
        value: (..., L, Dv): one value of Dv features for each key.
        attn_mask: broadcastable to (..., S, L). A u8 mask is 1 where a query attends to a key and 0 elsewhere; a
            floating-point mask is added to the scores. The result of a query that attends to no key is 0, or NaN if
            the mask needs a gradient.
        is_causal: whether the query at position i attends only to keys at positions 0 to i, also if a mask is given.
        scale: factor of the scores; default 1 / sqrt(D).

    Returns:
        (..., S, Dv).

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
        ArgumentError: if the scale is not finite.
    """

def set_float32_matmul_precision(precision: str) -> None:
    """
    Set the precision of products of f32 matrices on CUDA devices, as torch's function of the same name does.

    ```python
    tc.set_float32_matmul_precision("high")
    assert tc.get_float32_matmul_precision() == "high"
    tc.set_float32_matmul_precision("highest")
    ```

    Args:
        precision: "highest" for f32, the default; "high" for TF32, which is several times as fast on tensor cores, but
            rounds both factors to a mantissa of 10 bits. The precision affects neither other dtypes nor the CPU.
            Captured graphs keep the precision with which they were recorded.

    Raises:
        ArgumentError: if `precision` has another value.
    """

def set_grad_enabled(enabled: bool) -> bool:
    """
    Enable or disable recording on the tape in this thread; return whether it was enabled before.
    """

def set_gradient_vectors(
    parameters: Iterable[Var] | Mapping[str, Var], vectors: SupportsGetItem[int, Tensor]
) -> None:
    """
    Overwrite the gradients of variables with vectors of the sizes that `gradient_vectors` returns.

    Raises:
        ArgumentError: if there are more or fewer vectors than `gradient_vectors` returns.
        ShapeError, DTypeError, DeviceError: if a vector has another size, dtype or device than the gradients that it
            replaces.
    """

def set_num_threads(n: SupportsIndex) -> None:
    """
    Set the number of threads that compute on the CPU. Results do not depend on the number.

    ```python
    before = tc.get_num_threads()
    tc.set_num_threads(1)
    tc.set_num_threads(before)
    ```

    Raises:
        ArgumentError: if `n` is not from 1 to 1024, or the system cannot start so many threads.
    """

def set_resolver(resolve: Callable[..., Any]) -> None:
    """
    Set the function that finds models by names that are not paths. Only the first call has an effect.

    Args:
        resolve: a function with three arguments: the name, the subfolders of a repository in which the model may be
            (the most likely first; "" is the repository itself), and whether half-precision files are preferred. The
            function returns the model's folder, or None if it finds no model of this name.
    """

def set_rng_state(state: tuple[SupportsIndex, SupportsIndex]) -> None:
    """
    Set the library's generator to a state that `get_rng_state` returned.

    ```python
    state = tc.get_rng_state()
    drawn = tc.randn(3)
    tc.set_rng_state(state)
    assert tc.randn(3).tolist() == drawn.tolist()
    ```

    Raises:
        ArgumentError: if the seed or the position is not a number from 0 to 2**64 - 1.
    """

def set_w8a8(enabled: bool) -> None:
    """
    Choose whether linear layers with int8 or fp8 weights multiply the weights' 8-bit codes instead of the values that
    the codes represent. GPUs multiply 8-bit numbers up to four times as fast as bf16, but rounding the activations and
    gradients to 8 bits takes time.

    Right before a product, the activations or gradients are rounded to the format of the weight. The scale of each row
    of activations or gradients is the row's largest magnitude divided by 127 (int8) or 448 (fp8), as in torchao's
    dynamic quantization. In the backward pass, the product sums over the rows of the weight, which have different
    scales. So each element of a gradient is multiplied by the scale of its row of the weight before it is rounded. Sums
    of int8 products are exact; sums of fp8 products are in f32.

    Layers multiply values if their weights have other formats, if their numbers of features are not multiples of 16, or
    if their inputs are f64. On a GPU, products of codes need compute capability 7.5 or higher for int8, and 8.9 or
    higher for fp8; older GPUs multiply values.

    Choose before a model is loaded: if layers multiply codes, loading SDXL's UNet in int8 or fp8 quantizes only the
    layers of its feed-forward networks, because the products of its other layers are too small to gain speed.

    Args:
        enabled: whether layers multiply codes from now on. By default they multiply the values that codes represent.
            Captured graphs keep the choice with which they were recorded.
    """

def share_streamed(
    rank: SupportsIndex = 0, exchange: Callable[..., Any] | None = None, peers: bool = False
) -> None:
    """
    Share the streamed weights (see `stream_blocks` of `from_pretrained`) of the models that this thread loads from now
    on: the processes of a machine together keep one copy of these weights. All processes must call this function, and
    then load the same models in the same order.

    Args:
        rank: the number of this process, from 0.
        exchange: a function that sends its argument (bytes) to all processes, and returns the list of the bytes that
            the processes have sent, in the order of their ranks. None ends the sharing.
        peers: whether the copy is on the devices of the processes, one slice on each, instead of in host memory.

    Raises:
        ArgumentError: if `exchange` returns too few messages, or if `peers` is True and a process is alone on its
            machine.
        The exceptions of `exchange`.
    """

def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    beta: SupportsFloat | SupportsIndex = 1.0,
) -> Tensor:
    """
    Compute torch's `smooth_l1_loss` (Girshick 2015, arXiv:1504.08083) of the differences d = input - target:
    d² / (2 * beta) if |d| < beta, otherwise |d| - beta / 2. This is the Huber loss with the delta `beta`, divided by
    `beta`. By default, the result is the mean over all elements.

    ```python
    loss = F.smooth_l1_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]))
    each = F.smooth_l1_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]), reduction="none")
    assert loss.item() == each.mean().item()
    ```

    Args:
        input: a tensor of any shape.
        target: of the input's shape and dtype.
        reduction: "mean", "sum", or "none" for the losses of the elements.
        beta: the magnitude of the difference from which the loss is linear, at least 0; with 0 the loss is the absolute
            error.

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
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
    Stack tensors of the same shape along a new dimension, which has the index `dim` in the result.

    ```python
    assert tc.stack([tc.zeros(3), tc.ones(3)]).shape == (2, 3)
    ```

    Raises:
        ArgumentError: if there are no tensors.
        ShapeError: if the shapes differ.
        DTypeError: if the dtypes differ.
        IndexOutOfRangeError: if the dimension is out of range.
        OutOfMemoryError: if the result does not fit into memory.
    """

def stream_seed(seed: SupportsIndex, purpose: str, number: SupportsIndex) -> int:
    """
    Return the seed of one stream of random numbers. A run has a separate stream for each pair of `purpose` and
    `number`.

    Args:
        seed: the seed of the run, 0 to 2**64 - 1.
        purpose: what the random numbers are for, such as "noise". The error for another value lists all purposes.
        number: the number of the sample, batch or other item that the stream belongs to, 0 to 2**64 - 1.

    Raises:
        ArgumentError: if the purpose is unknown, or a number is out of range.
    """

def swiglu(input: Tensor) -> Tensor:
    """
    Compute `h * silu(gate)`, where h is the first half of the last dimension and gate the second (Shazeer 2020,
    arXiv:2002.05202).

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

def tensor(data: Any, dtype: DType | str | None = None, device: str | None = None) -> Tensor:
    """
    Make a tensor with a copy of `data`, detached from the tape.

    Args:
        data: a number, nested lists of numbers, a Tensor, a numpy array, or any object with `__dlpack__` or
            `__array__`.
        dtype: the dtype of the result. By default, an array keeps its dtype, except that int8, int16 and int32 become
            i64, uint16 becomes u32, and bool becomes u8. Numbers and lists become f32 if they contain a float or are
            empty, u8 if all are bools, and i64 otherwise. An integer dtype drops the fractions of floats.
        device: the device. By default, a Tensor keeps its device, and other data are put on the CPU.

    Raises:
        DTypeError: if the data are not numbers, no dtype can represent them (complex, uint64), or `dtype` is unknown.
        ShapeError: if nested lists are ragged or deeper than 32.
        ValueError: if lists contain arrays of different shapes.
        ArgumentError: if a number, alone or in lists, is an integer outside the range of i64; if `dtype` is an integer
            dtype and such a number is NaN or outside the range of `dtype`; or if lists contain a Tensor.
        DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
        OutOfMemoryError: if the copy does not fit into memory.
    """

def upsample_nearest2d(
    input: Tensor,
    size: SupportsIndex | Sequence[SupportsIndex] | None = None,
    scale_factor: SupportsIndex | Sequence[SupportsIndex] | None = None,
    *,
    channels_last: bool = False,
) -> Tensor:
    """
    Resize images as torch's `interpolate(mode="nearest")` does. Along a side of m pixels in the input and n pixels in
    the result, pixel i of the result is a copy of pixel floor(i * m / n) of the input.

    ```python
    image = tc.tensor([[[[1.0, 2.0]]]])
    assert F.upsample_nearest2d(image, scale_factor=2).tolist() == [[[[1.0, 1.0, 2.0, 2.0]] * 2]]
    ```

    Args:
        input: (B, C, H, W): images, channels, height, width.
        size: size of the result in pixels: one number or (height, width).
        scale_factor: instead of `size`: the size of the result divided by the size of the input, one whole number or
            (height, width).
        channels_last: whether the layout of input and result is (B, H, W, C). An input in this layout need not be
            copied.

    Returns:
        (B, C, height, width); (B, height, width, C) with `channels_last`.

    Raises:
        ArgumentError: if both or neither of `size` and `scale_factor` are given, or if a number in them is negative.
        ShapeError: if the input does not have four dimensions, or has no pixels while the result has some.
        DTypeError: if the input is not floating point.
        OutOfMemoryError: if the result does not fit into memory.
    """

def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    window: SupportsIndex | None = None,
    scale: SupportsFloat | SupportsIndex | None = None,
) -> Tensor:
    """
    Compute causal attention inside the segments of a packed row. A packed row is several sequences, the segments, one
    after another. The result for a query is softmax(query @ key.T * scale) @ value over the keys of the query's
    segment, up to the position of the query. On CUDA the host does not read `cu_seqlens`, so a recorded CUDA graph can
    be replayed with other values in it.

    ```python
    q, k, v = (tc.randn(10, 2, 8) for _ in range(3))
    y = F.varlen_attention(q, k, v, tc.tensor([0, 4, 10]))  # texts of 4 and 6 tokens
    assert y.shape == (10, 2, 8)
    ```

    Args:
        query: (N, heads, D): N tokens, D features per head.
        key: (N, key_heads, D). `heads` must be a multiple of `key_heads`; head h of the query attends to key head
            h // (heads // key_heads).
        value: (N, key_heads, D).
        cu_seqlens: (M + 1,), i64 or u32, ascending: 0, then the end of each of M segments. The last end may be
            repeated, so that a tensor of fixed size can hold fewer segments. Tokens from the last end on belong to no
            segment: their results and gradients are zeros.
        window: the largest number of keys that a query attends to: the key at its own position, and those just before.
            This is the sliding window of Mistral (Jiang et al. 2023, arXiv:2310.06825). Default: no limit.
        scale: factor of the scores; default 1 / sqrt(D).

    Returns:
        (N, heads, D).

    Raises:
        ShapeError, DTypeError, DeviceError: if the operands do not fit.
        IndexOutOfRangeError: if `cu_seqlens` does not ascend from 0 to at most N. On CUDA, the next call that reads a
            value or waits for the device raises this error; until then, the results are undefined.
        ArgumentError: if the window is below 1, or the scale is not finite.
    """

def verify_adapter(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    model: str = "sdxl",
    weights: str | bytes | PathLike[str] | PathLike[bytes] | None = None,
) -> AdapterReport:
    """
    Report how ComfyUI, diffusers and other tools would apply an adapter file to a model. The tools do not run: the
    report follows from the file.

    ```python
    report = tc.verify_adapter("adapter.safetensors", "sdxl", weights="sdxl")
    assert report.good  # ComfyUI applies every module as it was trained
    ```

    Args:
        path: the path of the adapter file, or of a folder with peft's files.
        model: the model family, such as "sdxl", "sd3" or "flux".
        weights: the path of the model's files, if the model's sizes differ from those of the published model. Only the
            headers of the files are read.

    Raises:
        MissingFileError: if the adapter file or the model's files do not exist.
        WeightsFormatError: if the adapter file is not a safetensors file, has no tensors or has an adapter that this
            library cannot read, or if the model's files are not in a known format.
        ConfigError: if the model family is unknown, if peft's configuration beside the file is not JSON, or if the
            configuration of the model's files is wrong.
    """

def where(condition: Tensor, input: Tensor | float | int, other: Tensor | float | int) -> Tensor:
    """
    Take each element from `input` where `condition` is not 0, and from `other` where it is 0. Shapes broadcast as in
    numpy.

    ```python
    x = tc.tensor([-1.0, 2.0])
    assert tc.where(x > 0, x, 0.0).tolist() == [0.0, 2.0]
    ```

    Args:
        condition: a u8 tensor, such as the result of a comparison.
        input: a tensor or a number.
        other: a tensor or a number. If both `input` and `other` are numbers, the result is f32.

    Raises:
        DTypeError: if `condition` is not u8, `input` and `other` are tensors of different dtypes, or one of them is a
            float and the other a tensor of integers.
        ArgumentError: if `input` or `other` is an integer outside the range of the result's dtype, or outside the range
            of f64 if this dtype is floating point.
        ShapeError: if the shapes do not broadcast.
        DeviceError: if the tensors are on different devices.
    """

def zeros(
    *shape: int | tuple[int, ...] | list[int], dtype: DType | str | None = None, device: str = "cpu"
) -> Tensor:
    """
    Make a tensor of zeros.

    Args:
        shape: the sizes, as arguments or one sequence.
        dtype: the dtype; default f32.
        device: the device.

    Raises:
        ShapeError: if a size is negative.
        DTypeError: if the dtype is unknown.
        DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
        OutOfMemoryError: if the tensor does not fit into memory.
    """

def zeros_like(
    input: Tensor, dtype: DType | str | None = None, device: str | None = None
) -> Tensor:
    """
    Return zeros in the shape of `input`. By default they have the dtype and the device of `input`.

    ```python
    x = tc.tensor([1, 2, 3])
    assert tc.zeros_like(x, dtype="f32").shape == x.shape
    ```

    Raises:
        DTypeError: if the dtype is unknown.
        DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
        OutOfMemoryError: if the tensor does not fit into memory.
    """
