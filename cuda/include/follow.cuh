// How kernels of a stream follow each other.
#pragma once

// The first statement of every kernel, which the build checks. From compute capability 9.0 on, kernels are launched while the one
// before them still runs (programmatic dependent launch): this lets the next one be launched when all blocks of this grid have
// begun, and waits until all work before this grid is done and its results can be read. What starts a kernel then costs no time
// between the two.
// Source: https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
__device__ __forceinline__ void follow() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n"
                 "griddepcontrol.wait;\n" ::
                     : "memory");
#endif
}
