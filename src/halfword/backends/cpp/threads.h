// The tiles of a call, spread over threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#include "works.h"

namespace halfword {

constexpr std::int64_t CHUNK = 64;  // tiles that a thread takes at once

// An OpenMP runtime's entry, as GCC calls it, and its number of the calling thread.
using Parallel = void (*)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
using ThreadNumber = int (*)();

// Rounds to nearest and keeps subnormal numbers, whatever the thread was set to before.
class IeeeArithmetic {
   public:
    IeeeArithmetic() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~IeeeArithmetic() { std::fesetenv(&before_); }
    IeeeArithmetic(const IeeeArithmetic&) = delete;
    IeeeArithmetic& operator=(const IeeeArithmetic&) = delete;

   private:
    std::fenv_t before_;
};

// Hands out tiles: to each thread the same share every time, so that its memory stays near it, and
// what is left of a slow thread's share to those that are done. Bits do not depend on who does it.
class Team {
   public:
    Team(const Works& works, int size) : works_(works), shares_(size) {
        for (int t = 0; t < size; ++t) {
            shares_[t].next = works.num_tiles() * t / size;
            shares_[t].end = works.num_tiles() * (t + 1) / size;
        }
    }

    void work(int thread) {
        const IeeeArithmetic ieee;
        const int size = static_cast<int>(shares_.size());
        for (int t = 0; t < size; ++t) {
            Share& share = shares_[(thread + t) % size];
            while (true) {
                const std::int64_t first = share.next.fetch_add(CHUNK);
                if (first >= share.end) break;
                works_.update(first, std::min(first + CHUNK, share.end));
            }
        }
    }

   private:
    struct alignas(64) Share {
        std::atomic<std::int64_t> next;
        std::int64_t end;
    };

    const Works& works_;
    std::vector<Share> shares_;
};

// The threads are those of the OpenMP runtime where there is one: torch's own are then used, and
// never twice as many as there should be.
inline void step(const Works& works, std::int64_t num_threads, Parallel parallel,
                 ThreadNumber number) {
    const std::int64_t chunks = (works.num_tiles() + CHUNK - 1) / CHUNK;
    const int size = static_cast<int>(std::max<std::int64_t>(1, std::min(chunks, num_threads)));
    Team team(works, size);
    if (size == 1) {
        team.work(0);
    } else if (parallel && number) {
        struct Data {
            Team& team;
            ThreadNumber number;
        } data{team, number};
        parallel(
            [](void* pointer) {
                auto* data = static_cast<Data*>(pointer);
                data->team.work(data->number());
            },
            &data, static_cast<unsigned>(size), 0);
    } else {
        std::vector<std::thread> others;
        try {
            for (int t = 1; t < size; ++t) others.emplace_back([&team, t] { team.work(t); });
        } catch (const std::system_error&) {
            // The threads that there are do the shares of those that there are not.
        }
        team.work(0);
        for (std::thread& other : others) other.join();
    }
}

}  // namespace halfword
