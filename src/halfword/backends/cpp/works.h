// Works that share rule and formats, and one tile's way through decode, rule and encode. Above this
// header pieces.py prints MAX_SLOTS, of any rule, and MAX_PLANES, of any format.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "noise.h"
#include "tile.h"

namespace halfword {

struct Plane {
    std::int64_t bytes, block;  // of one entry, and how many elements it covers, a part of a tile
};

using Decode = float* (*)(void* const* planes, float* tile);  // says where the values are
using Encode = void (*)(const float* tile, void* const* planes, const Noise& noise);

struct Format {
    Decode decode[2];  // by order; null where the format does not have it
    Encode encode[2];
    int num_planes;
    Plane planes[MAX_PLANES];
};

template <class F, class... Planes>
constexpr Format format(Planes... planes) {
    return {{F::decode, nullptr}, {F::encode, nullptr}, sizeof...(planes), {planes...}};
}

template <template <Order> class F, class... Planes>
constexpr Format format(Planes... planes) {
    return {{F<NATURAL>::decode, F<PAIRED>::decode},
            {F<NATURAL>::encode, F<PAIRED>::encode},
            sizeof...(planes),
            {planes...}};
}

struct Rule {
    void (*update)(float* x, const float* g, float* const* slots, const double* scalars);
    int num_slots;
};

// Each work is a row of 64-bit words, as native.py packs them: number of elements, index of the
// first, address of the scalars (the gradient's scale, then the rule's), step, noise streams of the
// weight and the slots, addresses of the weight's planes, the slots' and the gradient.
class Works {
   public:
    // formats: the weight's, the slots', the gradient's.
    Works(const Rule& rule, const Format* const* formats, const std::uint64_t* words,
          std::int64_t num_works)
        : rule_(rule), last_(rule.num_slots + 1), words_(words) {
        for (int f = 0; f <= last_; ++f) {
            formats_[f] = formats[f];
            if (!formats[f]->decode[PAIRED]) order_ = NATURAL;
            offsets_[f] = num_planes_;
            for (int p = 0; p < formats[f]->num_planes; ++p) {
                planes_[num_planes_] = formats[f]->planes[p];
                tile_bytes_[num_planes_] = bytes(num_planes_, TILE);
                ++num_planes_;
            }
        }
        num_words_ = 4 + last_ + num_planes_;
        ends_.reserve(num_works);
        std::int64_t end = 0;
        for (std::int64_t w = 0; w < num_works; ++w) {
            ends_.push_back(end += (count(w) + TILE - 1) / TILE);
        }
    }

    std::int64_t num_tiles() const { return ends_.empty() ? 0 : ends_.back(); }

    // Updates some tiles, counted through all works.
    void update(std::int64_t first, std::int64_t end) const {
        auto w = std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin();
        for (; first < end; ++w) {
            const std::int64_t begin = w ? ends_[w - 1] : 0;
            const std::int64_t stop = std::min(end, ends_[w]);
            for (; first < stop; ++first) update_tile(row(w), first - begin);
        }
    }

   private:
    static constexpr int ALL_PLANES = (MAX_SLOTS + 1) * MAX_PLANES + 1;

    const std::uint64_t* row(std::int64_t w) const { return words_ + w * num_words_; }
    std::int64_t count(std::int64_t w) const { return static_cast<std::int64_t>(row(w)[0]); }

    // The t-th tile of a work.
    void update_tile(const std::uint64_t* row, std::int64_t t) const {
        void* planes[ALL_PLANES];
        for (int p = 0; p < num_planes_; ++p) {
            planes[p] = reinterpret_cast<char*>(row[4 + last_ + p]) + t * tile_bytes_[p];
        }
        const std::int64_t left = static_cast<std::int64_t>(row[0]) - t * TILE;
        if (left >= TILE) {
            update_full_tile(row, t, planes);
        } else {
            update_padded_tile(row, t, planes, left);
        }
    }

    void update_padded_tile(const std::uint64_t* row, std::int64_t t, void* const* planes,
                            std::int64_t left) const {
        alignas(64) char copies[ALL_PLANES][TILE * sizeof(float)] = {};
        void* padded[ALL_PLANES];
        for (int p = 0; p < num_planes_; ++p) {
            padded[p] = std::memcpy(copies[p], planes[p], bytes(p, left));
        }
        update_full_tile(row, t, padded);
        for (int p = 0; p < offsets_[last_]; ++p) {
            std::memcpy(planes[p], padded[p], bytes(p, left));
        }
    }

    void update_full_tile(const std::uint64_t* row, std::int64_t t, void* const* planes) const {
        alignas(64) float tiles[MAX_SLOTS + 2][TILE];
        float* values[MAX_SLOTS + 2];
        for (int f = 0; f <= last_; ++f) {
            values[f] = formats_[f]->decode[order_](planes + offsets_[f], tiles[f]);
        }
        const auto* scalars = reinterpret_cast<const double*>(row[2]);
        prefetch_next(planes, 0);
        rule_.update(values[0], values[last_], values + 1, scalars);
        prefetch_next(planes, 1);
        for (int f = 0; f < last_; ++f) {
            const std::uint64_t index = row[1] + static_cast<std::uint64_t>(t * TILE);
            const Noise noise(row[4 + f], row[3], index);
            formats_[f]->encode[order_](values[f], planes + offsets_[f], noise);
        }
    }

    // Asks for one half of the tile after this one: the first while the rule divides, the second
    // while its results are encoded. Both at once are more lines than a core can wait for.
    void prefetch_next(void* const* planes, int half) const {
        for (int p = 0; p < num_planes_; ++p) {
            const std::int64_t size = tile_bytes_[p] / 2;
            const auto begin = reinterpret_cast<std::uintptr_t>(planes[p]) + tile_bytes_[p] + half * size;
            for (auto line = begin; line < begin + size; line += 64) {
                __builtin_prefetch(reinterpret_cast<const void*>(line));
            }
        }
    }

    std::int64_t bytes(int p, std::int64_t count) const {
        return count / planes_[p].block * planes_[p].bytes;
    }

    const Rule& rule_;
    const int last_;  // the gradient's place among the formats
    const Format* formats_[MAX_SLOTS + 2];
    Order order_ = PAIRED;  // where all formats have it
    Plane planes_[ALL_PLANES];
    std::int64_t tile_bytes_[ALL_PLANES];
    int num_planes_ = 0;
    int offsets_[MAX_SLOTS + 2];  // of a format's planes among them
    const std::uint64_t* words_;
    std::int64_t num_words_;
    std::vector<std::int64_t> ends_;  // of each work, in tiles
};

}  // namespace halfword
