// How kernels of a stream follow one another.
#pragma once

// The first statement of every kernel is `follow` or `follow_after`; the build checks this. From compute capability 9.0 on, a kernel
// may start while the kernel before it still runs (programmatic dependent launch). `follow` allows the next kernel to start as soon as
// all blocks of this kernel have started. Then it waits until all work that was queued before this kernel is complete and its results
// can be read. So the time between two kernels is short, but their work never overlaps. Below 9.0, `follow` does nothing.
// Source: https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
__device__ __forceinline__ void follow() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n"
                 "griddepcontrol.wait;\n" ::
                     : "memory");
#endif
}

// As `follow`, but calls `prepare` before it waits. `prepare` may set up shared memory and read the kernel's arguments. It must not access
// memory that other kernels read or write.
template <typename F> __device__ __forceinline__ void follow_after(F prepare) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
    prepare();
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
#else
    prepare();
#endif
}
