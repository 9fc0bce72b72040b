// What every piece works on: a tile of FP32 values that stays in the first cache between the loops
// of decode, rule and encode. Short loops of constant length over plain arrays are what compilers
// vectorise well; one loop over all three stages has more operations in flight than a processor can
// hold, and is slower. A last, partial tile is padded.

#pragma once

#include <cstdint>
#include <cstring>

namespace halfword {

constexpr int TILE = 256;

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
