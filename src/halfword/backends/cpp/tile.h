// What every piece works on: a tile of FP32 values that stays in the first cache between the loops
// of decode, rule and encode. Short loops of constant length over plain arrays are what compilers
// vectorise well; one loop over all three stages has more operations in flight than a processor can
// hold, and is slower. A last, partial tile is padded.

#pragma once

#include <cstdint>
#include <cstring>

namespace halfword {

constexpr int TILE = 256;

// How elements stand in a tile: as in memory, or those of even index before those of odd index. Two
// 16-bit elements share a 32-bit word, so their formats need no shuffles in the second order.
enum Order { NATURAL, PAIRED };

// The place in memory of the element that stands at k in a tile.
template <Order order>
constexpr int element(int k) {
    return order == NATURAL ? k : k < TILE / 2 ? 2 * k : 2 * k - TILE + 1;
}

inline float as_float(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline std::uint32_t as_bits(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

}  // namespace halfword
