// Planes of 16-bit elements to and from tiles, in either order. On the way an element is the upper
// half of a 32-bit word: BF16 is then FP32 already, and no loop has two widths in it.

#pragma once

#include <array>

#include "tile.h"

namespace halfword {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the even element is the lower half");

constexpr std::uint32_t UPPER_HALF = 0xFFFF0000u;

// value = decoded(an element of each plane)
template <Order order, class Decoded, class... Planes>
inline void load_halves(float* __restrict tile, Decoded decoded, const Planes*... planes) {
    const auto pair = [](const void* plane, int k) {
        std::uint32_t word;
        std::memcpy(&word, static_cast<const char*>(plane) + 4 * k, sizeof word);
        return word;
    };
    for (int k = 0; k < TILE / 2; ++k) {
        const int even = order == NATURAL ? 2 * k : k;
        const int odd = order == NATURAL ? 2 * k + 1 : k + TILE / 2;
        tile[even] = decoded(pair(planes, k) << 16 ...);
        tile[odd] = decoded(pair(planes, k) & UPPER_HALF...);
    }
}

// {an element of each plane} = encoded(value, its place in the tile); lower halves mean nothing.
template <Order order, class Encoded, class... Planes>
inline void store_halves(const float* __restrict tile, Encoded encoded,
                         Planes* __restrict... planes) {
    using Elements = std::array<std::uint32_t, sizeof...(planes)>;
    if constexpr (order == NATURAL) {
        for (int k = 0; k < TILE; ++k) {
            const Elements elements = encoded(tile[k], k);
            int p = 0;
            ((static_cast<std::uint16_t*>(planes)[k] = elements[p++] >> 16), ...);
        }
    } else {
        for (int k = 0; k < TILE / 2; ++k) {
            const Elements even = encoded(tile[k], k);
            const Elements odd = encoded(tile[k + TILE / 2], k + TILE / 2);
            int p = 0;
            const auto store = [&](void* plane) {
                const std::uint32_t pair = even[p] >> 16 | (odd[p] & UPPER_HALF);
                std::memcpy(static_cast<char*>(plane) + 4 * k, &pair, sizeof pair);
                ++p;
            };
            (store(planes), ...);
        }
    }
}

}  // namespace halfword
