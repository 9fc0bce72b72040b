// A low-precision weight beside an FP32 copy, as formats/shadow.py.

#pragma once

#include "half.h"
#include "noise.h"
#include "rounding.h"

namespace halfword {

template <std::uint32_t rounded(float), float shown(std::uint32_t)>
struct shadow {
    static float* decode(void* const* planes, float* __restrict tile) {
        const auto* __restrict weight = static_cast<const std::uint16_t*>(planes[0]);
        const auto* __restrict copy = static_cast<const float*>(planes[1]);
        for (int k = 0; k < TILE; ++k) {
            const float alone = shown(std::uint32_t{weight[k]} << 16);
            const bool both_nan = (alone != alone) & (copy[k] != copy[k]);
            const bool same = rounded(copy[k]) >> 16 == weight[k];
            tile[k] = (same | both_nan) ? copy[k] : alone;
        }
        return tile;
    }

    static void encode(const float* __restrict tile, void* const* planes, const Noise&) {
        auto* __restrict weight = static_cast<std::uint16_t*>(planes[0]);
        for (int k = 0; k < TILE; ++k) {
            weight[k] = static_cast<std::uint16_t>(rounded(tile[k]) >> 16);
        }
        std::memcpy(planes[1], tile, TILE * sizeof(float));
    }
};

using bf16_fp32 = shadow<nearest_away, as_float>;
using fp16_fp32 = shadow<fp16_bits, fp16_value>;

}  // namespace halfword
