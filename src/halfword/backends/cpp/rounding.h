// Rounding FP32 to BF16 on bit patterns, as formats/rounding.py. The result is the upper half of
// what is returned; the lower half means nothing.

#pragma once

#include "tile.h"

namespace halfword {

constexpr std::uint32_t ONE_NAN = 0x7FC00000u;

// Chosen by a mask: a conditional would be moved past the shifts and truncations that follow it,
// and be done on two widths.
inline std::uint32_t fp32_bits(float x) {
    const std::uint32_t nan = 0u - static_cast<std::uint32_t>(x != x);
    return (as_bits(x) & ~nan) | (ONE_NAN & nan);
}

inline std::uint32_t nearest_even(float x) {
    const std::uint32_t u = fp32_bits(x);
    return u + 0x7FFF + ((u >> 16) & 1);
}

inline std::uint32_t nearest_away(float x) { return fp32_bits(x) + 0x8000; }

// An Inf stays one: its lower half is 0, and noise does not carry out of that.
inline std::uint32_t stochastic(float x, std::uint32_t noise) {
    return fp32_bits(x) + noise;
}

}  // namespace halfword
