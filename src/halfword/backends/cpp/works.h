// Works that share rule and formats, and one tile's way through decode, rule and encode.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "noise.h"
#include "tile.h"

namespace halfword {

struct Plane {
    std::int64_t bytes, block;  // of one entry, and how many elements it covers
};

struct Format {
    float* (*decode)(void* const* planes, float* tile);  // says where the values are
    void (*encode)(const float* tile, void* const* planes, const Noise& noise);
    int num_planes;
    Plane planes[MAX_PLANES];
};

struct Rule {
    void (*update)(float* x, const float* g, float* const* slots, const double* scalars);
    int num_slots;
};

// Works that share rule and formats. Each is a row of 64-bit words, as native.py packs them:
// number of elements, index of the first, address of the scalars, noise keys, addresses of planes.
class Works {
   public:
    // formats: the weight's, the slots', the gradient's.
    Works(const Rule& rule, const Format* const* formats, const std::uint64_t* words,
          std::int64_t num_works)
        : rule_(rule), last_(rule.num_slots + 1), words_(words) {
        for (int f = 0; f <= last_; ++f) {
            formats_[f] = formats[f];
            offsets_[f + 1] = offsets_[f] + formats[f]->num_planes;
        }
        num_words_ = 3 + last_ + offsets_[last_ + 1];
        ends_.reserve(num_works);
        std::int64_t end = 0;
        for (std::int64_t w = 0; w < num_works; ++w) {
            ends_.push_back(end += (count(w) + TILE - 1) / TILE);
        }
    }

    std::int64_t num_tiles() const { return ends_.empty() ? 0 : ends_.back(); }

    // Tiles are counted through all works.
    void update(std::int64_t first, std::int64_t end) const {
        auto w = std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin();
        for (; first < end; ++w) {
            const std::int64_t begin = w ? ends_[w - 1] : 0;
            const std::int64_t stop = std::min(end, ends_[w]);
            for (; first < stop; ++first) update_tile(w, (first - begin) * TILE);
        }
    }

   private:
    static constexpr int ALL_PLANES = (MAX_SLOTS + 1) * MAX_PLANES + 1;

    const std::uint64_t* row(std::int64_t w) const { return words_ + w * num_words_; }
    std::int64_t count(std::int64_t w) const { return static_cast<std::int64_t>(row(w)[0]); }

    void update_tile(std::int64_t w, std::int64_t first) const {
        const std::uint64_t* addresses = row(w) + 3 + last_;
        void* planes[ALL_PLANES];
        for_each_plane([&](int p, Plane plane) {
            planes[p] = reinterpret_cast<char*>(addresses[p]) + first / plane.block * plane.bytes;
        });
        const std::int64_t left = count(w) - first;
        if (left >= TILE) {
            update_full_tile(w, first, planes);
        } else {
            update_padded_tile(w, first, planes, left);
        }
    }

    void update_padded_tile(std::int64_t w, std::int64_t first, void* const* planes,
                            std::int64_t left) const {
        alignas(64) char copies[ALL_PLANES][TILE * sizeof(float)] = {};
        void* padded[ALL_PLANES];
        const auto size = [&](Plane plane) { return left / plane.block * plane.bytes; };
        for_each_plane([&](int p, Plane plane) {
            padded[p] = std::memcpy(copies[p], planes[p], size(plane));
        });
        update_full_tile(w, first, padded);
        for_each_plane([&](int p, Plane plane) {
            if (p < offsets_[last_]) std::memcpy(planes[p], padded[p], size(plane));
        });
    }

    void update_full_tile(std::int64_t w, std::int64_t first, void* const* planes) const {
        alignas(64) float tiles[MAX_SLOTS + 2][TILE];
        float* values[MAX_SLOTS + 2];
        const std::uint64_t* words = row(w);
        for (int f = 0; f <= last_; ++f) {
            values[f] = formats_[f]->decode(planes + offsets_[f], tiles[f]);
        }
        rule_.update(values[0], values[last_], values + 1,
                     reinterpret_cast<const double*>(words[2]));
        for (int f = 0; f < last_; ++f) {
            const Noise noise(words[3 + f], words[1] + static_cast<std::uint64_t>(first));
            formats_[f]->encode(values[f], planes + offsets_[f], noise);
        }
    }

    template <class Body>
    void for_each_plane(Body body) const {
        for (int f = 0; f <= last_; ++f) {
            for (int p = 0; p < formats_[f]->num_planes; ++p) {
                body(offsets_[f] + p, formats_[f]->planes[p]);
            }
        }
    }

    const Rule& rule_;
    const int last_;                        // the gradient's place among the formats
    const Format* formats_[MAX_SLOTS + 2];
    int offsets_[MAX_SLOTS + 3] = {};       // of a format's planes among a work's
    const std::uint64_t* words_;
    std::int64_t num_words_;
    std::vector<std::int64_t> ends_;  // of each work, in tiles
};

}  // namespace halfword
