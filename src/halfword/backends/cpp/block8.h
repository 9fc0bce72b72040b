// Moments in 8 bits, as formats/block8.py: codes of 64 neighbours share a scale.

#pragma once

#include <algorithm>

#include "noise.h"
#include "rounding.h"

namespace halfword {

constexpr int BLOCK = 64, HALF_BLOCK = BLOCK / 2, BLOCKS = TILE / BLOCK;
static_assert(TILE % BLOCK == 0, "a tile has whole blocks");

constexpr std::uint32_t INFINITE = 0x7F800000u;

// Where a half of a block begins in a tile. With even elements first they are one half.
template <Order order>
constexpr int place(int block, int half) {
    return order == NATURAL ? block * BLOCK + half * HALF_BLOCK
                            : block * HALF_BLOCK + half * (TILE / 2);
}

// The largest of each block's N patterns, which stand one block after the other.
template <int N>
inline void find_largest(const std::uint32_t* __restrict patterns,
                         std::uint32_t* __restrict largest) {
    alignas(64) std::uint32_t half[BLOCKS * N / 2];
    if constexpr (N == 1) {
        std::copy(patterns, patterns + BLOCKS, largest);
        return;
    } else if constexpr (N > 4) {  // vectors, without a shuffle
        for (int b = 0; b < BLOCKS; ++b) {
            const std::uint32_t* block = patterns + b * N;
            for (int j = 0; j < N / 2; ++j) {
                half[b * N / 2 + j] = std::max(block[j], block[j + N / 2]);
            }
        }
    } else {
        for (int j = 0; j < BLOCKS * N / 2; ++j) {
            half[j] = std::max(patterns[2 * j], patterns[2 * j + 1]);
        }
    }
    find_largest<N / 2>(half, largest);
}

template <Order order, class Code>
struct block8 {
    static float* decode(void* const* planes, float* __restrict tile) {
        const auto* codes = static_cast<const unsigned char*>(planes[0]);
        float scales[BLOCKS];
        std::memcpy(scales, planes[1], sizeof scales);
        for (int b = 0; b < BLOCKS; ++b) {
            if constexpr (order == NATURAL) {
                for (int k = b * BLOCK; k < (b + 1) * BLOCK; ++k) {
                    tile[k] = Code::level(std::uint32_t{codes[k]} << 24) * scales[b];
                }
            } else {
                for (int k = b * HALF_BLOCK; k < (b + 1) * HALF_BLOCK; ++k) {
                    std::uint16_t pair;
                    std::memcpy(&pair, codes + 2 * k, sizeof pair);
                    const std::uint32_t word = std::uint32_t{pair} << 16;
                    tile[k] = Code::level(word << 8) * scales[b];
                    tile[k + TILE / 2] = Code::level(word & 0xFF000000u) * scales[b];
                }
            }
        }
        return tile;
    }

    static void encode(const float* tile, void* const* planes, const Noise& noise) {
        auto* codes = static_cast<unsigned char*>(planes[0]);
        alignas(64) std::uint32_t words[TILE], largest[BLOCKS];
        float inverses[BLOCKS];
        measure(tile, largest);
        noise.fill<order>(words);  // in the time that the last steps of measuring wait for
        store_scales(largest, inverses, planes[1]);
        round(tile, inverses, words);
        store_codes(words, codes);
        for (int b = 0; b < BLOCKS; ++b) {
            if (largest[b] >= INFINITE) std::memset(codes + b * BLOCK, 0, BLOCK);
        }
    }

   private:
    static void measure(const float* __restrict tile, std::uint32_t* __restrict largest) {
        alignas(64) std::uint32_t patterns[TILE / 2];
        for (int b = 0; b < BLOCKS; ++b) {
            for (int j = 0; j < HALF_BLOCK; ++j) {
                patterns[b * HALF_BLOCK + j] =
                    std::max(Code::magnitude(tile[place<order>(b, 0) + j]),
                             Code::magnitude(tile[place<order>(b, 1) + j]));
            }
        }
        find_largest<HALF_BLOCK>(patterns, largest);
    }

    static void store_scales(const std::uint32_t* largest, float* inverses, void* plane) {
        float scales[BLOCKS];
        for (int b = 0; b < BLOCKS; ++b) {
            const float max = as_float(std::min(largest[b], INFINITE));
            const float scale = std::max(max / Code::TOP, Code::LEAST);
            scales[b] = largest[b] == 0 ? 0.0f : largest[b] < INFINITE ? scale : as_float(ONE_NAN);
            inverses[b] = std::min(Code::TOP / max, 1 / Code::LEAST);
        }
        std::memcpy(plane, scales, sizeof scales);
    }

    // words: noise, and then codes, in their low bytes.
    static void round(const float* __restrict tile, const float* __restrict inverses,
                      std::uint32_t* __restrict words) {
        for (int b = 0; b < BLOCKS; ++b) {
            for (int half = 0; half < 2; ++half) {
                for (int j = 0; j < HALF_BLOCK; ++j) {
                    const int k = place<order>(b, half) + j;
                    words[k] = Code::nearby(tile[k], inverses[b], words[k]);
                }
            }
        }
    }

    static void store_codes(const std::uint32_t* __restrict words, unsigned char* codes) {
        if constexpr (order == NATURAL) {
            for (int k = 0; k < TILE; ++k) codes[k] = static_cast<unsigned char>(words[k]);
        } else {
            for (int k = 0; k < TILE / 2; ++k) {
                const auto pair =
                    static_cast<std::uint16_t>((words[k] & 0xFF) | words[k + TILE / 2] << 8);
                std::memcpy(codes + 2 * k, &pair, sizeof pair);
            }
        }
    }
};

// How a code is made from a value and read from the upper byte of a word; in nearby, the patterns
// of the numbers that are added end in zeros above the code, so that its byte needs no correction.

struct Multiples {
    static constexpr float TOP = 127.0f, LEAST = 0x1p-126f;

    static std::uint32_t magnitude(float x) { return as_bits(x) & 0x7FFFFFFFu; }

    static std::uint32_t nearby(float x, float inverse, std::uint32_t noise) {
        return (as_bits(x * inverse + 768.0f) + (noise >> 2)) >> 14;
    }

    static float level(std::uint32_t word) {
        return static_cast<float>(static_cast<std::int32_t>(word) >> 24);
    }
};

struct Octaves {
    static constexpr float TOP = 502.0f, LEAST = 0x1p-122f;

    // Above infinity where the sign is set, which makes a NaN of the block.
    static std::uint32_t magnitude(float x) { return as_bits(x); }

    static std::uint32_t nearby(float x, float inverse, std::uint32_t noise) {
        const std::uint32_t code = (as_bits(x * inverse + 2.0f) + (noise << 2)) >> 18;
        // 4096 is code 0; a positive value's pattern is larger than code 1, and zero's is smaller.
        return std::max(code, std::min(as_bits(x), 4097u));
    }

    static float level(std::uint32_t word) { return as_float((word >> 6) + as_bits(2.0f)) - 2.0f; }
};

template <Order order>
using int8 = block8<order, Multiples>;
template <Order order>
using uint8 = block8<order, Octaves>;

}  // namespace halfword
