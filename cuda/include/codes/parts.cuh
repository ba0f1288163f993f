// A matrix of 8-bit codes that consists of several matrices, its parts, one below the other.
#pragma once

#include <cstdint>

// The largest number of parts. A kernel takes the number of parts in use as an argument of its own.
constexpr int MOST_PARTS = 8;

// The part with rows `start` to `start` + `rows` - 1 of the whole matrix. It has a scale for each row, or one for all rows
// (`scale_count` is 1). `unused` stands where the structure would have padding, so that the host can declare the same bytes.
struct CodePart {
    const void *codes, *scales;
    uint32_t start, rows, scale_count, unused;
};

struct CodeParts {
    CodePart list[MOST_PARTS];
};
