// How kernels of a stream follow one another.
#pragma once

// The first statement of every kernel is `follow` or `follow_after`; the build checks this. From compute capability 9.0 on, a kernel
// starts while the kernel before it still runs (programmatic dependent launch). `follow` lets the next kernel start when all blocks of
// this one have started, and waits until all work before this kernel is complete and its results can be read. So the time between two
// kernels is short, and nothing else changes.
// Source: https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
__device__ __forceinline__ void follow() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n"
                 "griddepcontrol.wait;\n" ::
                     : "memory");
#endif
}

// As `follow`, for a kernel that calls `prepare` before it waits. `prepare` must not access memory that other kernels write or read: it
// may set up shared memory and read arguments.
template <typename F> __device__ __forceinline__ void follow_after(F prepare) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
    prepare();
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
#else
    prepare();
#endif
}
