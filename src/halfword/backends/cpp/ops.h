// The words of ops.py: what a rule that is printed as C++ may call, each rounded once.

#pragma once

#include <cmath>

namespace halfword {

inline float sqrt(float x) { return std::sqrt(x); }

inline float sign(float x) {
    return x != x ? x : static_cast<float>(x > 0.0f) - static_cast<float>(x < 0.0f);
}

// What the step writes for a slot's value: +0 for |x| < 2^-126.
inline float flush_subnormals(float x) { return std::fabs(x) < 0x1p-126f ? 0.0f : x; }

}  // namespace halfword
