// FP16 in integer arithmetic: vector units convert it in ways of their own, or not at all. As with
// BF16, the element is the upper half of a word.

#pragma once

#include "halves.h"

namespace halfword {

// Exact; 2^-14 is FP16's smallest normal number.
inline float fp16_value(std::uint32_t element) {
    const std::uint32_t magnitude = (element & 0x7FFF0000u) >> 3;
    const float subnormal = as_float(magnitude + (113u << 23)) - 0x1p-14f;
    const std::uint32_t bias = magnitude < 0x0F800000u ? 112u << 23 : 224u << 23;  // Inf, NaN
    const std::uint32_t normal = magnitude + bias;
    const std::uint32_t u = magnitude < 0x00800000u ? as_bits(subnormal) : normal;
    return as_float(u | (element & 0x80000000u));
}

// To nearest, ties to even, as formats/shadow.py; every NaN becomes the one that torch writes.
inline std::uint32_t fp16_bits(float x) {
    const std::uint32_t sign = as_bits(x) & 0x80000000u;
    const std::uint32_t u = as_bits(x) & 0x7FFFFFFFu;
    // Adding 0.5 lets the processor round to multiples of 2^-24, FP16's subnormal step.
    const std::uint32_t subnormal = as_bits(as_float(u) + 0.5f) - as_bits(0.5f);
    const std::uint32_t normal = (u - (112u << 23) + 0xFFF + (u >> 13 & 1)) >> 13;
    const std::uint32_t finite = u < 113u << 23 ? subnormal : normal;
    const std::uint32_t magnitude = u < 143u << 23 ? finite : 0x7C00u;
    return x != x ? 0x7E000000u : sign | magnitude << 16;
}

template <Order order>
struct fp16 {
    static float* decode(void* const* planes, float* tile) {
        load_halves<order>(tile, fp16_value, planes[0]);
        return tile;
    }
};

}  // namespace halfword
