"""Train the autoencoder, and the classifiers that select images and give the perceptual loss."""

import itertools
import time

import torch
from diffusers import AutoencoderKL
from photos import FLOWERS
from torch import nn
from torch.nn import functional

from models import autoencoder

KL_WEIGHT = 2e-4
DETAIL_WEIGHT = 0.3
"""The weight of the perceptual loss, `detail_distance`."""
ADVERSARY_WEIGHT = 0.15
ADVERSARY_START = 0.4
"""The share of the training time after which the adversary is used."""
CLEAR = 0.35
"""An image is clear if a classifier gives its flower a probability above this."""


class Classifier(nn.Module):
    """Finds which flower an image shows.

    The perceptual loss compares the classifier's hidden states of two images.
    """

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 192)
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width_in, width_out, 3, padding=1),
                nn.BatchNorm2d(width_out),
                nn.ReLU(),
                nn.Conv2d(width_out, width_out, 3, stride=2, padding=1),
                nn.BatchNorm2d(width_out),
                nn.ReLU(),
            )
            for width_in, width_out in itertools.pairwise(widths)
        )
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(widths[-1], len(FLOWERS)))

    def features(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the outputs of the four stages, from fine to coarse."""
        hidden = []
        for stage in self.stages:
            x = stage(x)
            hidden.append(x)
        return hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits (N, flowers) of images (N, 3, H, W) in [-1, 1]."""
        return self.head(self.features(x)[-1].mean((2, 3)))


def augmented(pixels: torch.Tensor) -> torch.Tensor:
    """Mirror all images of a batch, or none, and shift all by the same offset of up to 8 pixels."""
    if torch.rand(()) < 0.5:
        pixels = pixels.flip(-1)
    size = pixels.shape[-1]
    padded = functional.pad(pixels, (8, 8, 8, 8), mode="reflect")
    top, left = torch.randint(0, 17, (2,)).tolist()
    return padded[..., top : top + size, left : left + size]


def to_unit(pixels: torch.Tensor) -> torch.Tensor:
    """Convert bytes (N, H, W, 3) to floats in [-1, 1] of shape (N, 3, H, W)."""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


def train_classifier(pixels: torch.Tensor, labels: torch.Tensor, steps: int) -> Classifier:
    """Train a classifier on bytes (N, H, W, 3) with the indices of their flowers, (N,)."""
    device = pixels.device
    model = Classifier().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        chosen = torch.randint(len(pixels), (128,), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(augmented(to_unit(pixels[chosen])))
        loss = functional.cross_entropy(logits.float(), labels[chosen], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval().requires_grad_(requires_grad=False)


@torch.no_grad()
def clear_images(pixels: torch.Tensor, labels: torch.Tensor, steps: int) -> torch.Tensor:
    """Return whether each image shows its flower clearly, (N,) booleans.

    Four classifiers are trained, each without a quarter of the images. An image is clear if the
    classifier that was not trained on the image gives its flower a probability above `CLEAR`.

    Args:
        pixels: the images, bytes (N, H, W, 3).
        labels: the indices of their flowers, (N,).
        steps: the training steps of each classifier.
    """
    fold = torch.arange(len(pixels), device=pixels.device) % 4
    # The probability of each image's flower.
    probability = torch.zeros(len(pixels), device=pixels.device)
    correct = 0
    for held_out in range(4):
        trained_on = fold != held_out
        with torch.enable_grad():
            model = train_classifier(pixels[trained_on], labels[trained_on], steps)
        for index in torch.nonzero(~trained_on)[:, 0].split(256):
            of_flowers = model(to_unit(pixels[index])).softmax(-1)
            correct += int((of_flowers.argmax(-1) == labels[index]).sum())
            probability[index] = of_flowers.gather(1, labels[index, None])[:, 0]
    print(f"classifier: {correct / len(pixels):.1%} right on held-out images", flush=True)
    return probability > CLEAR


def adversary() -> nn.Sequential:
    """Make a patch discriminator (Isola et al., 2017) with group norm."""
    return nn.Sequential(
        nn.Conv2d(3, 48, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(48, 96, 4, 2, 1),
        nn.GroupNorm(8, 96),
        nn.LeakyReLU(0.2),
        nn.Conv2d(96, 128, 4, 1, 1),
        nn.GroupNorm(8, 128),
        nn.LeakyReLU(0.2),
        nn.Conv2d(128, 1, 4, 1, 1),
    )


def detail_distance(
    classifier: Classifier, real: torch.Tensor, decoded: torch.Tensor
) -> torch.Tensor:
    """Return the perceptual loss: the mean L1 distance of the classifier's hidden states.

    Both images' states are divided by the standard deviation of the real image's states.
    """
    total = decoded.new_zeros(())
    features = zip(classifier.features(real), classifier.features(decoded), strict=True)
    for of_real, of_decoded in features:
        scale = of_real.std() + 1e-3
        total = total + functional.l1_loss(of_decoded / scale, of_real / scale)
    return total / len(classifier.stages)


def train(
    pixels: torch.Tensor, classifier: Classifier, seconds: float, batch: int = 64
) -> AutoencoderKL:
    """Train an autoencoder with L1, perceptual and KL losses, later also with an adversarial loss.

    As in VQGAN (Esser et al., 2021), the weight of the adversarial loss is such that the norm of
    its gradient in the decoder's last layer is `ADVERSARY_WEIGHT` times that of the L1 and
    perceptual losses.

    Args:
        pixels: the images, bytes (N, H, W, 3).
        classifier: gives the perceptual loss.
        seconds: how long to train.
        batch: images in a step.

    Returns:
        The autoencoder with exponentially averaged weights and standardised latents.
    """
    device = pixels.device
    model = autoencoder().to(device, memory_format=torch.channels_last).train()
    critic = adversary().to(device, memory_format=torch.channels_last)
    rate = 1.5e-3
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.99), weight_decay=1e-4)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), 4e-4, betas=(0.5, 0.9))
    last_layer = model.decoder.conv_out.weight
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.998)
    )
    start, step, progress = time.monotonic(), 0, 0.0
    while progress < 1:
        progress = (time.monotonic() - start) / seconds
        # 200 steps of warm-up; then the peak rate; in the second half of the time, a linear decay
        # to 2 % of the peak.
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 200, 0.02 + max(0.0, 1 - progress) / 0.5)
        real = augmented(to_unit(pixels[torch.randint(len(pixels), (batch,), device=device)]))
        real = real.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            posterior = model.encode(real).latent_dist
            decoded = model.decode(posterior.sample()).sample.float()
            detail = detail_distance(classifier, real, decoded)
        reconstruction = functional.l1_loss(decoded, real) + DETAIL_WEIGHT * detail.float()
        # `kl()` is a sum over the elements of each latent; the division makes it a mean.
        loss = reconstruction + KL_WEIGHT * posterior.kl().mean() / posterior.mean[0].numel()
        is_adversarial = progress > ADVERSARY_START
        if is_adversarial:
            adversarial = -critic(decoded).mean()
            norm, adversarial_norm = (
                torch.autograd.grad(term, last_layer, retain_graph=True)[0].norm()
                for term in (reconstruction, adversarial)
            )
            weight = (norm / (adversarial_norm + 1e-6)).clamp(0, 100).detach()
            loss = loss + ADVERSARY_WEIGHT * weight * adversarial
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        averaged.update_parameters(model)
        if is_adversarial:
            hinge = (
                functional.relu(1 - critic(real)).mean()
                + functional.relu(1 + critic(decoded.detach())).mean()
            )
            critic_optimizer.zero_grad()
            hinge.backward()
            critic_optimizer.step()
        if step % 200 == 0:
            error = float(functional.mse_loss(decoded.detach(), real))
            print(f"vae {step:5d} {progress:4.0%} mse {error:.4f}", flush=True)
        step += 1
    model = averaged.module.eval().requires_grad_(requires_grad=False)
    standardise(model, pixels)
    return model


@torch.no_grad()
def encode(model: AutoencoderKL, pixels: torch.Tensor) -> torch.Tensor:
    """Return the latents of bytes (N, H, W, 3): the posterior's mean, scaled, (N, 4, H/8, W/8)."""
    parts = [model.encode(to_unit(part)).latent_dist.mean for part in pixels.split(256)]
    return torch.cat(parts) * model.config.scaling_factor


@torch.no_grad()
def standardise(model: AutoencoderKL, pixels: torch.Tensor) -> None:
    """Scale and shift each latent channel, without a change of the reconstructions.

    The 1x1 convolutions before and after the latents absorb the scale and the shift. Afterwards,
    the latents of the first 2048 images times SDXL's `scaling_factor`, 0.13025, have mean 0 and
    variance 1 in each channel.
    """
    # `encode` multiplies by the scaling factor; the means of the posterior are needed.
    latents = encode(model, pixels[:2048]) / model.config.scaling_factor
    channels = latents.shape[1]
    mean = latents.mean((0, 2, 3))
    scale = 1 / (latents.std((0, 2, 3)) * model.config.scaling_factor)
    before, after = model.quant_conv, model.post_quant_conv
    # `after` undoes the scale and the shift that `before` applies. The outputs of `before` are the
    # means of the latents, then the logarithms of their variances.
    after.bias += after.weight[:, :, 0, 0] @ mean
    after.weight /= scale[None, :, None, None]
    before.weight[:channels] *= scale[:, None, None, None]
    before.bias[:channels] = (before.bias[:channels] - mean) * scale
    before.bias[channels:] += 2 * scale.log()
