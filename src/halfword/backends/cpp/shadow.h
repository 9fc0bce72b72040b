// A low-precision weight beside an FP32 copy, as formats/shadow.py.

#pragma once

#include "half.h"
#include "noise.h"
#include "rounding.h"

namespace halfword {

template <std::uint16_t rounded(float), float shown(std::uint16_t)>
struct shadow {
    static float* decode(void* const* planes, float* __restrict tile) {
        const auto* __restrict weight = static_cast<const std::uint16_t*>(planes[0]);
        const auto* __restrict copy = static_cast<const float*>(planes[1]);
        for (int k = 0; k < TILE; ++k) {
            const float alone = shown(weight[k]);
            const bool both_nan = (alone != alone) & (copy[k] != copy[k]);
            tile[k] = (rounded(copy[k]) == weight[k]) | both_nan ? copy[k] : alone;
        }
        return tile;
    }

    static void encode(const float* __restrict tile, void* const* planes, const Noise&) {
        auto* __restrict weight = static_cast<std::uint16_t*>(planes[0]);
        for (int k = 0; k < TILE; ++k) weight[k] = rounded(tile[k]);
        std::memcpy(planes[1], tile, TILE * sizeof(float));
    }
};

using bf16_fp32 = shadow<nearest_away, bf16_value>;
using fp16_fp32 = shadow<fp16_bits, fp16_value>;

}  // namespace halfword
