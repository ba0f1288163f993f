//! Multiresolution noise ("pyramid noise"): the weighted sum of standard normal noise at several resolutions, enlarged
//! to one size.
//!
//! The idea is from J. Whitaker 2023, "Multi-Resolution Noise for Diffusion Model Training",
//! <https://wandb.ai/johnowhitaker/multires_noise/reports/Multi-Resolution-Noise-for-Diffusion-Model-Training--VmlldzozNjYyOTU2>. The
//! formula is the one in kohya's scripts,
//! <https://github.com/kohya-ss/sd-scripts/blob/0329bea5848f1761a3bb1a540cb47324dd88e059/library/custom_train_functions.py>.

use trainable_candle_core::rng;

/// The settings of multiresolution noise.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pyramid {
    /// The largest number of resolution levels in the sum.
    pub iterations: usize,
    /// The weight of each level divided by the weight of the level before.
    pub discount: f64,
}

impl Pyramid {
    /// Draws noise for one example from the generator of this thread. The caller adds the result to standard normal
    /// noise.
    ///
    /// The result is Σᵢ `discount`ⁱ · enlarge(noiseᵢ), in the shape `[channels, h, w]`, where i counts levels from 0.
    /// noiseᵢ is standard normal noise of ⌊h / rᵢⁱ⌋ × ⌊w / rᵢⁱ⌋ pixels (each side at least one pixel), and rᵢ is
    /// uniform in [2, 4). The sum ends with the first level that has a side of one pixel.
    pub fn draw(self, [channels, height, width]: [usize; 3]) -> Vec<f32> {
        let mut sum = vec![0f32; channels * height * width];
        let mut weight = 1.0;
        for level in 0..self.iterations {
            let shrink = (2.0 + 2.0 * f64::from(rng::uniform_vec(1)[0])).powi(level as i32);
            let side = |whole: usize| ((whole as f64 / shrink) as usize).max(1);
            let small = [side(height), side(width)];
            let noise = rng::normal_vec(channels * small[0] * small[1]);
            add_enlarged(&mut sum, [height, width], &noise, small, weight as f32);
            if small.contains(&1) {
                break;
            }
            weight *= self.discount;
        }
        sum
    }
}

/// Enlarge each image of `images` from `small` to `size` by bilinear interpolation, multiply the enlarged image by
/// `weight`, and add it to the image with the same index in `sums`. `images` and `sums` hold one image after the other,
/// row by row. Both sizes are (height, width) in pixels.
fn add_enlarged(sums: &mut [f32], size: [usize; 2], images: &[f32], small: [usize; 2], weight: f32) {
    // The neighbours, in the small image, of each row and of each column of the enlarged image.
    let [rows, columns] = [0, 1].map(|axis| neighbours(small[axis], size[axis]));
    let pixels = (size[0] * size[1]).max(1); // `chunks_exact_mut` panics for 0
    for (sum_image, image) in sums.chunks_exact_mut(pixels).zip(images.chunks_exact(small[0] * small[1])) {
        for (sum_row, row) in sum_image.chunks_exact_mut(size[1]).zip(&rows) {
            let line_of_small = |at: usize| &image[at * small[1]..(at + 1) * small[1]];
            let (above, below) = (line_of_small(row.at[0]), line_of_small(row.at[1]));
            for (sum, column) in sum_row.iter_mut().zip(&columns) {
                let between = |line: &[f32]| mix(line[column.at[0]], line[column.at[1]], column.share);
                *sum += weight * mix(between(above), between(below), row.share);
            }
        }
    }
}

/// The linear interpolation between `a` and `b`, where `share` is the weight of `b`.
fn mix(a: f32, b: f32, share: f32) -> f32 {
    a * (1.0 - share) + b * share
}

/// The two input pixels between which an output pixel is interpolated.
struct Neighbours {
    /// The indices of the two input pixels.
    at: [usize; 2],
    /// The weight of the second input pixel. The weight of the first is 1 - `share`.
    share: f32,
}

/// The neighbours of each output pixel along an axis that is enlarged from `input` to `output` pixels, as in torch's
/// `interpolate(mode="bilinear", align_corners=False)`: the centre of pixel i is at i + 0.5. An output pixel whose
/// centre is before the centre of the first input pixel gets the value of the first input pixel.
fn neighbours(input: usize, output: usize) -> Vec<Neighbours> {
    let scale = input as f64 / output as f64;
    let of = |i: usize| {
        let position = ((i as f64 + 0.5) * scale - 0.5).max(0.0);
        let first = (position as usize).min(input - 1);
        Neighbours { at: [first, (first + 1).min(input - 1)], share: (position - first as f64) as f32 }
    };
    (0..output).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enlarged(image: &[f32], small: [usize; 2], size: [usize; 2]) -> Vec<f32> {
        let mut sums = vec![0.0; image.len() / (small[0] * small[1]) * size[0] * size[1]];
        add_enlarged(&mut sums, size, image, small, 1.0);
        sums
    }

    /// The expected values are from torch 2.11, `F.interpolate(x, size, mode="bilinear")`.
    #[test]
    fn images_are_enlarged_as_by_torch() {
        let found = enlarged(&[0.0, 1.0, 4.0, 9.0, 16.0, 25.0], [2, 3], [3, 5]);
        let expected = [0.0, 0.4, 1.0, 2.8, 4.0, 4.5, 6.1, 8.5, 12.1, 14.5, 9.0, 11.8, 16.0, 21.4, 25.0];
        assert!(found.iter().zip(expected).all(|(f, e)| (f - e).abs() < 4e-6), "{found:?}");
        // The same function also makes an image smaller.
        assert_eq!(enlarged(&[0.0, 1.0, 4.0], [1, 3], [1, 2]), [0.25, 3.25]);
        // Two images of one pixel.
        assert_eq!(enlarged(&[7.0, 2.0], [1, 1], [2, 2]), [7.0, 7.0, 7.0, 7.0, 2.0, 2.0, 2.0, 2.0]);
    }
}
