//! The dynamic map of 8-bit codes, for optimizer states and the scales of NF4.

/// The 256 values of the dynamic map in ascending order. They are in [-1, 1] if `signed`, otherwise in [0, 1].
///
/// The map has seven decades, which end at 1e-6, 1e-5, ..., 1. Decade i (from 0 on) has 2^i values of each sign, or
/// 2^(i+1) values if unsigned. To get these values, the range from a tenth of the decade's end to the decade's end is
/// divided into equal intervals; the values are the intervals' midpoints. 0 and 1 complete the map.
///
/// Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861; follows
/// <https://github.com/bitsandbytes-foundation/bitsandbytes/blob/95f9af309d4d5793847169c39288dcd3fcbdf564/bitsandbytes/functional.py#L296>.
pub fn create_dynamic_map(signed: bool) -> [f32; 256] {
    const DECADES: u32 = 7;
    let mut values = Vec::with_capacity(256);
    for decade in 0..DECADES {
        let intervals = 1usize << if signed { decade } else { decade + 1 };
        let decade_end = 10f64.powi(decade as i32 - (DECADES as i32 - 1)) as f32;
        for i in 0..intervals {
            let middle = (linspace(0.1, 1.0, intervals, i) + linspace(0.1, 1.0, intervals, i + 1)) / 2.0;
            values.push(decade_end * middle);
            if signed {
                values.push(-decade_end * middle);
            }
        }
    }
    values.extend([0.0, 1.0]);
    values.sort_by(f32::total_cmp);
    let mut map = [0.0; 256];
    map.copy_from_slice(&values);
    map
}

/// Point `i` of the points 0 to `intervals` that divide the range from `start` to `end` into equal intervals. It is
/// computed from the nearer end, so that it is rounded as in torch's `linspace`.
fn linspace(start: f32, end: f32, intervals: usize, i: usize) -> f32 {
    let step = (end - start) / intervals as f32;
    if i < intervals.div_ceil(2) { step.mul_add(i as f32, start) } else { (-step).mul_add((intervals - i) as f32, end) }
}
