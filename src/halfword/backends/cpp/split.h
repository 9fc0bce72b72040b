// The BF16 weight plus a signed remainder are one wider number, as formats/split.py.

#pragma once

#include "halves.h"
#include "noise.h"
#include "rounding.h"

namespace halfword {

// Reads the weight alone where a stale remainder beside zero or Inf would make a NaN.
inline float joined(std::uint32_t weight, std::int32_t remainder) {
    const float alone = as_float(weight);
    const float x = as_float(weight + static_cast<std::uint32_t>(remainder));
    return x != x ? alone : x;
}

template <Order order>
struct split {
    static float* decode(void* const* planes, float* tile) {
        const auto decoded = [](std::uint32_t weight, std::uint32_t remainder) {
            return joined(weight, static_cast<std::int32_t>(remainder) >> 16);
        };
        load_halves<order>(tile, decoded, planes[0], planes[1]);
        return tile;
    }

    static void encode(const float* tile, void* const* planes, const Noise&) {
        const auto encoded = [](float x, int) {
            return std::array{nearest_away(x), fp32_bits(x) << 16};
        };
        store_halves<order>(tile, encoded, planes[0], planes[1]);
    }
};

struct split24 {
    static float* decode(void* const* planes, float* __restrict tile) {
        const auto* __restrict weight = static_cast<const std::uint16_t*>(planes[0]);
        const auto* __restrict remainder = static_cast<const std::int8_t*>(planes[1]);
        for (int k = 0; k < TILE; ++k) tile[k] = joined(weight[k] << 16, remainder[k] * 256);
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
