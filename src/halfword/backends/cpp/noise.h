// Random bits as a pure function of key and element index; docs/numerics.md states it, noise.py
// defines it.

#pragma once

#include "tile.h"

namespace halfword {

class Noise {
   public:
    // key: the two words of noise.key, the first one lowest; index: of the tile's first element.
    Noise(std::uint64_t key, std::uint64_t index)
        : k0_(static_cast<std::uint32_t>(key)),
          k1_(static_cast<std::uint32_t>(key >> 32)),
          index_(index) {}

    void fill(std::uint32_t* __restrict bits) const {
        const auto low = static_cast<std::uint32_t>(index_);
        if (low > 0u - TILE) {  // the upper word changes within the tile
            for (int k = 0; k < TILE; ++k) bits[k] = at(index_ + k);
            return;
        }
        const std::uint32_t key = upper_key(index_);
        // Four streams in step: one alone waits for its own multiplications.
        constexpr int STREAMS = 4, LENGTH = TILE / STREAMS;
        for (int k = 0; k < LENGTH; ++k) {
            std::uint32_t x[STREAMS];
            for (int s = 0; s < STREAMS; ++s) x[s] = (low + k + s * LENGTH) ^ k0_;
            mix(x);
            for (int s = 0; s < STREAMS; ++s) x[s] += key;
            mix(x);
            for (int s = 0; s < STREAMS; ++s) bits[k + s * LENGTH] = x[s];
        }
    }

   private:
    std::uint32_t at(std::uint64_t index) const {
        std::uint32_t x[1] = {static_cast<std::uint32_t>(index) ^ k0_};
        mix(x);
        x[0] += upper_key(index);
        mix(x);
        return x[0];
    }

    std::uint32_t upper_key(std::uint64_t index) const {
        return (static_cast<std::uint32_t>(index >> 32) * 0x9E3779B9u) ^ k1_;
    }

    template <int N>
    static void mix(std::uint32_t (&x)[N]) {
        for (int s = 0; s < N; ++s) x[s] ^= x[s] >> 16;
        for (int s = 0; s < N; ++s) x[s] *= 0x7FEB352Du;
        for (int s = 0; s < N; ++s) x[s] ^= x[s] >> 15;
        for (int s = 0; s < N; ++s) x[s] *= 0x846CA68Bu;
        for (int s = 0; s < N; ++s) x[s] ^= x[s] >> 16;
    }

    std::uint32_t k0_, k1_;
    std::uint64_t index_;
};

}  // namespace halfword
