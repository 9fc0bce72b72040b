// FP32 and nearest-rounded BF16, as formats/plain.py.

#pragma once

#include "noise.h"
#include "rounding.h"

namespace halfword {

struct fp32 {
    // The values are where the rule may work on them.
    static float* decode(void* const* planes, float*) { return static_cast<float*>(planes[0]); }

    static void encode(const float*, void* const*, const Noise&) {}
};

struct bf16 {
    static float* decode(void* const* planes, float* __restrict tile) {
        const auto* __restrict stored = static_cast<const std::uint16_t*>(planes[0]);
        for (int k = 0; k < TILE; ++k) tile[k] = bf16_value(stored[k]);
        return tile;
    }

    static void encode(const float* __restrict tile, void* const* planes, const Noise&) {
        auto* __restrict stored = static_cast<std::uint16_t*>(planes[0]);
        for (int k = 0; k < TILE; ++k) stored[k] = nearest_even(tile[k]);
    }
};

}  // namespace halfword
