// Products of 64 rows of 8-bit codes and up to 256 columns, by a warpgroup (PTX `wgmma`, sm_90a).
#pragma once

#include <cstdint>

// The lower half of the descriptor of an operand with rows of 128 bytes, for a product whose sum runs along the rows. Descriptors hold
// addresses and distances in units of DESCRIPTOR_UNIT bytes, so descriptor + n describes an operand n * DESCRIPTOR_UNIT bytes later. The
// hardware ignores the distance in the upper 16 bits for such products; it is one unit here.
constexpr uint32_t DESCRIPTOR_UNIT = 16;
__device__ __forceinline__ uint32_t rows_descriptor(uint32_t address) { return address / DESCRIPTOR_UNIT | 1 << 16; }
// The upper half: 128-byte swizzle, groups of eight rows 1024 bytes apart (1 << 30 | 1024 / DESCRIPTOR_UNIT).
#define ROWS_DESCRIPTOR "1073741888"

// SUMS_n lists n operands kind(d[i]), kind(d[i + 1]), ... for an asm statement (i = 0 where SUMS_n does not take i), and REGISTERS_n their
// placeholders %0, %1, ... in the text of the statement.
#define SUMS_8(kind, d, i)                                                                                                             \
    kind(d[i]), kind(d[i + 1]), kind(d[i + 2]), kind(d[i + 3]), kind(d[i + 4]), kind(d[i + 5]), kind(d[i + 6]), kind(d[i + 7])
#define SUMS_24(kind, d, i) SUMS_8(kind, d, i), SUMS_8(kind, d, i + 8), SUMS_8(kind, d, i + 16)
#define SUMS_40(kind, d) SUMS_24(kind, d, 0), SUMS_8(kind, d, 24), SUMS_8(kind, d, 32)
#define SUMS_64(kind, d) SUMS_40(kind, d), SUMS_24(kind, d, 40)
#define SUMS_80(kind, d) SUMS_64(kind, d), SUMS_8(kind, d, 64), SUMS_8(kind, d, 72)
#define SUMS_128(kind, d) SUMS_80(kind, d), SUMS_24(kind, d, 80), SUMS_24(kind, d, 104)
#define REGISTERS_40 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
#define REGISTERS_64 \
    REGISTERS_40 \
    ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
    "%62, %63"
#define REGISTERS_80 \
    REGISTERS_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define REGISTERS_128 \
    REGISTERS_80 \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, " \
    "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, " \
    "%121, %122, %123, %124, %125, %126, %127"

// multiply_codes starts to compute sums (64 rows, columns) = x wᵀ, or sums += x wᵀ if `add`, with codes x (64, 32) and w (columns, 32),
// whose descriptors are `left` and `right`. The caller waits for the sums. Sums of int8 codes are signed integers in uint32_t registers,
// and sums of e4m3 codes are floats. Arguments of the macro: `signs` are the signs of the factors (1: unchanged), which only instructions
// with floats take; `count` is the number of sums of a thread, columns / 2; `a`, `b` and `adds` are the numbers of the assembly operands
// with `left`, `right` and `add`, which are count, count + 1 and count + 2.
#define INTEGER(sum) "+r"(sum)
#define FLOAT(sum) "+f"(sum)
#define PRODUCT_OF_CODES(type, kind, instruction, columns, signs, count, a, b, adds)                                                   \
    __device__ __forceinline__ void multiply_codes(type(&sums)[count], uint32_t left, uint32_t right, bool add) {                      \
        asm volatile("{\n.reg .pred adds;\n.reg .b64 left, right;\nsetp.ne.b32 adds, %" adds ", 0;\n"                                  \
                     "mov.b64 left, {%" a ", " ROWS_DESCRIPTOR "};\nmov.b64 right, {%" b ", " ROWS_DESCRIPTOR "};\n"                   \
                     "wgmma.mma_async.sync.aligned.m64n" columns "k32." instruction " {" REGISTERS_##count "}, left, right, adds"      \
                     signs ";\n}"                                                                                                      \
                     : SUMS_##count(kind, sums)                                                                                        \
                     : "r"(left), "r"(right), "r"(int(add)));                                                                          \
    }
PRODUCT_OF_CODES(uint32_t, INTEGER, "s32.s8.s8", "80", "", 40, "40", "41", "42")
PRODUCT_OF_CODES(uint32_t, INTEGER, "s32.s8.s8", "128", "", 64, "64", "65", "66")
PRODUCT_OF_CODES(uint32_t, INTEGER, "s32.s8.s8", "160", "", 80, "80", "81", "82")
PRODUCT_OF_CODES(uint32_t, INTEGER, "s32.s8.s8", "256", "", 128, "128", "129", "130")
// The kernels for e4m3 codes have tiles of 80 columns only; cuda/kernels/codes_hopper.cu says why.
PRODUCT_OF_CODES(float, FLOAT, "f32.e4m3.e4m3", "80", ", 1, 1", 40, "40", "41", "42")
