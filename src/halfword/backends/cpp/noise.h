// Random bits as a pure function of key and element index; docs/numerics.md states it, noise.py
// defines it.

#pragma once

#include "tile.h"

namespace halfword {

class Noise {
   public:
    // index: of the tile's first element.
    Noise(std::uint64_t stream, std::uint64_t step, std::uint64_t index) : index_(index) {
        std::uint64_t z = stream + step * 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        z ^= z >> 31;
        k0_ = static_cast<std::uint32_t>(z);
        k1_ = static_cast<std::uint32_t>(z >> 32);
    }

    // The 16 bits of each of a tile's elements, in the tile's order.
    template <Order order>
    void fill(std::uint32_t* __restrict bits) const {
        const std::uint64_t pair = index_ / 2;
        const auto low = static_cast<std::uint32_t>(pair);
        if (index_ % 2 || low > 0u - TILE / 2) {  // a pair cut by the tile, or another upper word
            for (int k = 0; k < TILE; ++k) bits[k] = at(index_ + element<order>(k));
            return;
        }
        const std::uint32_t key = upper_key(pair);
        // Four streams in step: one alone waits for its own multiplications.
        constexpr int STREAMS = 4, LENGTH = TILE / 2 / STREAMS;
        for (int k = 0; k < LENGTH; ++k) {
            std::uint32_t x[STREAMS];
            for (int s = 0; s < STREAMS; ++s) x[s] = (low + k + s * LENGTH) ^ k0_;
            mix(x);
            for (int s = 0; s < STREAMS; ++s) x[s] += key;
            mix(x);
            for (int s = 0; s < STREAMS; ++s) {
                const int p = k + s * LENGTH;
                bits[order == NATURAL ? 2 * p : p] = x[s] & 0xFFFF;
                bits[order == NATURAL ? 2 * p + 1 : p + TILE / 2] = x[s] >> 16;
            }
        }
    }

   private:
    std::uint32_t at(std::uint64_t index) const {
        std::uint32_t x[1] = {static_cast<std::uint32_t>(index / 2) ^ k0_};
        mix(x);
        x[0] += upper_key(index / 2);
        mix(x);
        return index % 2 ? x[0] >> 16 : x[0] & 0xFFFF;
    }

    std::uint32_t upper_key(std::uint64_t pair) const {
        return (static_cast<std::uint32_t>(pair >> 32) * 0x9E3779B9u) ^ k1_;
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
