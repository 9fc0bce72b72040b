// BF16 with stochastic rounding, as formats/stochastic.py.

#pragma once

#include "plain.h"

namespace halfword {

struct bf16_sr {
    static float* decode(void* const* planes, float* tile) { return bf16::decode(planes, tile); }

    static void encode(const float* __restrict tile, void* const* planes, const Noise& noise) {
        auto* __restrict stored = static_cast<std::uint16_t*>(planes[0]);
        alignas(64) std::uint32_t bits[TILE];
        noise.fill(bits);
        for (int k = 0; k < TILE; ++k) stored[k] = stochastic(tile[k], bits[k]);
    }
};

}  // namespace halfword
