// The BF16 weight plus a signed remainder are one wider number, as formats/split.py.

#pragma once

#include "noise.h"
#include "rounding.h"

namespace halfword {

// Reads the weight alone where a stale remainder beside zero or Inf would make a NaN.
inline float numbers_only(float x, float weight) { return x != x ? weight : x; }

struct split {
    static float* decode(void* const* planes, float* __restrict tile) {
        const auto* __restrict weight = static_cast<const std::uint16_t*>(planes[0]);
        const auto* __restrict remainder = static_cast<const std::int16_t*>(planes[1]);
        for (int k = 0; k < TILE; ++k) {
            const float alone = bf16_value(weight[k]);
            const auto rest = static_cast<std::uint32_t>(remainder[k]);
            tile[k] = numbers_only(as_float(as_bits(alone) + rest), alone);
        }
        return tile;
    }

    static void encode(const float* __restrict tile, void* const* planes, const Noise&) {
        auto* __restrict weight = static_cast<std::uint16_t*>(planes[0]);
        auto* __restrict remainder = static_cast<std::int16_t*>(planes[1]);
        for (int k = 0; k < TILE; ++k) {
            const std::uint32_t u = fp32_bits(tile[k]);
            weight[k] = static_cast<std::uint16_t>((u + 0x8000) >> 16);
            remainder[k] = static_cast<std::int16_t>(u);
        }
    }
};

struct split24 {
    static float* decode(void* const* planes, float* __restrict tile) {
        const auto* __restrict weight = static_cast<const std::uint16_t*>(planes[0]);
        const auto* __restrict remainder = static_cast<const std::int8_t*>(planes[1]);
        for (int k = 0; k < TILE; ++k) {
            const float alone = bf16_value(weight[k]);
            const auto rest = static_cast<std::uint32_t>(remainder[k]) << 8;
            tile[k] = numbers_only(as_float(as_bits(alone) + rest), alone);
        }
        return tile;
    }

    static void encode(const float* __restrict tile, void* const* planes, const Noise&) {
        auto* __restrict weight = static_cast<std::uint16_t*>(planes[0]);
        auto* __restrict remainder = static_cast<std::int8_t*>(planes[1]);
        for (int k = 0; k < TILE; ++k) {
            const std::uint32_t u24 = (fp32_bits(tile[k]) + 0x80) >> 8;
            weight[k] = static_cast<std::uint16_t>((u24 + 0x80) >> 8);
            remainder[k] = static_cast<std::int8_t>(u24);
        }
    }
};

}  // namespace halfword
