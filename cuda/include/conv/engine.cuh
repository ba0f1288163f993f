// The copies that the convolution kernels make with the copy engine of compute capability 9.0.
#pragma once

#include "../engine.cuh"
#include "copy.cuh"

// The tensor maps of a convolution; conv_hopper.cu says how they are encoded. `dense` maps the weight or, for the gradient
// of the weight, the gradient of the output. `windows[0]` maps the input. For the gradient of the input, however,
// `windows[phase]` maps the gradient of the output. There is a phase for each pair of an input pixel's coordinates modulo the
// strides, at most 4. Passed by value.
struct Conv2dMaps {
    TensorMap dense, windows[4];
};

// Starts to copy pixels from consecutive windows of the kernel, as many as the map says, to shared memory at `to`. Of each window,
// it copies the pixel at one kernel tap: 64 channels from `channel` on. `barrier` is the address of an mbarrier in shared memory,
// which counts the copied bytes. In the first window, (image, y, x) is the pixel with the lowest coordinates, and the tap's
// pixel has the coordinates (y + offset_y, x + offset_x). With BOTH, the engine copies into both blocks of the cluster (the
// mask 3), and the barrier of each block counts the bytes.
template <bool BOTH> __device__ __forceinline__ void copy_windows(uint32_t to, const TensorMap &map, uint32_t barrier,
                                                                  int channel, int x, int y, int image,
                                                                  uint16_t offset_x, uint16_t offset_y) {
    if constexpr (BOTH) {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8}, %9;\n" ::"r"(to),
            "l"(&map), "r"(channel), "r"(x), "r"(y), "r"(image), "r"(barrier), "h"(offset_x), "h"(offset_y),
            "h"(uint16_t(3))
            : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};\n" ::"r"(to),
                     "l"(&map), "r"(channel), "r"(x), "r"(y), "r"(image), "r"(barrier), "h"(offset_x), "h"(offset_y)
                     : "memory");
    }
}
