// BF16 with stochastic rounding, as formats/stochastic.py.

#pragma once

#include "plain.h"

namespace halfword {

template <Order order>
struct bf16_sr {
    static float* decode(void* const* planes, float* tile) {
        return bf16<order>::decode(planes, tile);
    }

    static void encode(const float* tile, void* const* planes, const Noise& noise) {
        alignas(64) std::uint32_t bits[TILE];
        noise.fill<order>(bits);
        const auto encoded = [&bits](float x, int k) { return std::array{stochastic(x, bits[k])}; };
        store_halves<order>(tile, encoded, planes[0]);
    }
};

}  // namespace halfword
