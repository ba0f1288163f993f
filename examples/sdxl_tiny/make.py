"""Train the small SDXL that ships with trainable-candle.

The script needs torch, diffusers and transformers, which trainable-candle itself does not need. Run
it on a CUDA GPU: training times are set in seconds, and a CPU takes only a few steps in this time.

    python examples/sdxl_tiny/make.py --photos flower_photos --output sdxl_tiny

`--photos` names the folder of TensorFlow's unpacked archive flower_photos: the folders daisy,
dandelion, roses, sunflowers and tulips, and LICENSE.txt, which names each image's photographer.
"""

import argparse
import shutil
from pathlib import Path

import diffusion
import numpy as np
import photos
import tokenizer
import torch
import vae as autoencoding
from diffusers import AutoencoderKL, UNet2DConditionModel
from PIL import Image
from torch import nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection

import models

SEED = 0
PROMPTS = [
    "a photo of a white daisy",
    "a photo of a yellow dandelion",
    "a photo of a red rose",
    "a photo of a pink rose",
    "a photo of a yellow sunflower",
    "a photo of a red tulip",
    "a photo of a yellow tulip",
    "a photo of a purple tulip",
]


def reconstructions(vae: AutoencoderKL, pixels: torch.Tensor) -> Image.Image:
    """Return a row of the images, bytes (N, H, W, 3), above a row of their reconstructions.

    Prints the PSNR of all reconstructions together.
    """
    with torch.no_grad():
        # `encode` multiplies by the scaling factor; `decode` expects latents without it.
        latents = autoencoding.encode(vae, pixels) / vae.config.scaling_factor
        decoded = vae.decode(latents).sample.clamp(-1, 1).permute(0, 2, 3, 1)
    decoded = ((decoded + 1) * 127.5).round().byte()
    error = (decoded.float() - pixels.float()).square().mean() / 255**2
    print(f"vae: {-10 * float(error.log10()):.2f} dB PSNR", flush=True)
    rows = [torch.cat(list(images), 1) for images in (pixels, decoded)]
    return Image.fromarray(torch.cat(rows).cpu().numpy())


def load_networks(folder: Path) -> nn.ModuleDict:
    """Load the UNet and the text encoders of a checkpoint in f32."""
    return nn.ModuleDict(
        {
            "unet": UNet2DConditionModel.from_pretrained(folder / "unet"),
            "text_encoder": CLIPTextModel.from_pretrained(folder / "text_encoder"),
            "text_encoder_2": CLIPTextModelWithProjection.from_pretrained(
                folder / "text_encoder_2"
            ),
        }
    ).float()


def new_networks(vocabulary_size: int) -> nn.ModuleDict:
    """Make the UNet and the text encoders with random weights."""
    # `tokenizer.write` puts the tokens before and after a text at the end of the vocabulary.
    start, end = vocabulary_size - 2, vocabulary_size - 1
    first, second = models.text_encoders(vocabulary_size, start, end)
    return nn.ModuleDict({"unet": models.unet(), "text_encoder": first, "text_encoder_2": second})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--start-from", type=Path, help="an earlier --output to train further")
    parser.add_argument("--classifier-steps", type=int, default=500)
    parser.add_argument("--vae-seconds", type=float, default=150)
    parser.add_argument("--unet-seconds", type=float, default=300)
    parser.add_argument("--rate", type=float, default=2e-3, help="the UNet's peak learning rate")
    parser.add_argument("--variants", type=int, default=8, help="number of crops of each image")
    arguments = parser.parse_args()

    torch.manual_seed(SEED)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    output, earlier = arguments.output, arguments.start_from

    data = photos.load(arguments.photos)
    pixels = torch.from_numpy(data.pixels).to(device)
    labels = torch.from_numpy(data.flowers).to(device)
    # For each image, whether it shows its flower clearly. The autoencoder trains on all images, the
    # UNet and the text encoders on the clear ones.
    clear = autoencoding.clear_images(pixels, labels, arguments.classifier_steps)
    if earlier:
        vae = AutoencoderKL.from_pretrained(earlier / "vae").float().to(device)
    else:
        classifier = autoencoding.train_classifier(pixels, labels, arguments.classifier_steps)
        vae = autoencoding.train(pixels, classifier, arguments.vae_seconds)
    output.mkdir(parents=True, exist_ok=True)
    # Twelve images that are spread over all flowers, because the images are sorted by flower.
    shown = torch.arange(0, len(pixels), max(1, len(pixels) // 12), device=device)[:12]
    reconstructions(vae, pixels[shown]).save(output / "reconstructions.png")

    data = data.keep(clear.cpu().numpy())
    print(f"{len(data)} of {len(pixels)} images show their flower clearly", flush=True)
    # All captions, with `per_pair` captions for each pair (flower, colour) one after another;
    # `first_rows` maps a pair to the index of its first caption.
    texts, first_rows, per_pair = diffusion.caption_table(data)
    if earlier:
        for name in ("tokenizer", "tokenizer_2"):
            shutil.copytree(earlier / name, output / name, dirs_exist_ok=True)
        networks = load_networks(earlier).to(device)
    else:
        networks = new_networks(tokenizer.write(output, texts)).to(device)
    # Several crops of each image; `sources` has the index of each crop's image.
    cropped, sources, time_ids = photos.crops(data, arguments.variants, SEED)
    pairs = list(zip(data.flowers.tolist(), data.colours, strict=True))
    caption_rows = np.asarray([first_rows[pairs[index]] for index in sources])
    latents = diffusion.Latents(
        torch.cat(
            [
                autoencoding.encode(vae, torch.from_numpy(part).to(device))
                # About 1024 crops at a time go to the device.
                for part in np.array_split(cropped, max(1, len(cropped) // 1024))
            ]
        ),
        torch.from_numpy(time_ids).to(device),
        torch.from_numpy(caption_rows).to(device),
    )
    print(f"{len(texts)} captions, {len(cropped)} crops", flush=True)
    # The empty text is for captions that training drops.
    table = diffusion.tokenise(output, [*texts, ""], device)
    networks.train()
    averaged = diffusion.train(
        networks, latents, table, per_pair, arguments.unet_seconds, arguments.rate
    )
    diffusion.save(output, averaged, vae)
    for guidance in (1.0, 4.0, 7.0):
        # A row of 8 images for each prompt.
        grid = diffusion.sample(output, PROMPTS, 8, guidance, models.RESOLUTION)
        grid.save(output / f"samples_{guidance:.0f}.png")


if __name__ == "__main__":
    main()
