// FP32 and nearest-rounded BF16, as formats/plain.py.

#pragma once

#include "halves.h"
#include "noise.h"
#include "rounding.h"

namespace halfword {

struct fp32 {
    // The values are where the rule may work on them.
    static float* decode(void* const* planes, float*) { return static_cast<float*>(planes[0]); }

    static void encode(const float*, void* const*, const Noise&) {}
};

template <Order order>
struct bf16 {
    static float* decode(void* const* planes, float* tile) {
        load_halves<order>(tile, as_float, planes[0]);
        return tile;
    }

    static void encode(const float* tile, void* const* planes, const Noise&) {
        const auto encoded = [](float x, int) { return std::array{nearest_even(x)}; };
        store_halves<order>(tile, encoded, planes[0]);
    }
};

}  // namespace halfword
