// The C interface, below the tables RULES and FORMATS that pieces.py prints.

#pragma once

#include "exchange.h"
#include "half.h"
#include "plain.h"
#include "threads.h"

namespace halfword {

// In the order of GRADIENTS in pieces.py.
const Format GRADIENTS[] = {
    format<fp32>(Plane{4, 1}),
    format<bf16>(Plane{2, 1}),
    {{fp16<NATURAL>::decode, fp16<PAIRED>::decode}, {}, 1, {{2, 1}}},
};

}  // namespace halfword

// parts: the places of the rule, the weight's format, each slot's, and the gradient's in their
// tables; words: a row for each work, see Works.
extern "C" __attribute__((visibility("default"))) void halfword_step(
    const std::int64_t* parts, const std::uint64_t* words, std::int64_t num_works,
    std::int64_t num_threads, halfword::Parallel parallel, halfword::ThreadNumber number) {
    using namespace halfword;
    const Rule& rule = RULES[parts[0]];
    const Format* formats[MAX_SLOTS + 2] = {&FORMATS[parts[1]]};
    for (int s = 0; s < rule.num_slots; ++s) formats[1 + s] = &FORMATS[parts[2 + s]];
    formats[1 + rule.num_slots] = &GRADIENTS[parts[2 + rule.num_slots]];
    const Works works(rule, formats, words, num_works);
    step(works, num_threads, parallel, number);
}

// Writes what each tensor is; the caller holds Python's lock. Where one cannot be told of, returns
// false, with Python's error set.
extern "C" __attribute__((visibility("default"))) bool halfword_see(
    const halfword::DLPackExchangeAPI* api, void* const* tensors, std::int64_t num_tensors,
    halfword::Seen* seen) {
    for (std::int64_t t = 0; t < num_tensors; ++t) {
        halfword::DLTensor tensor;
        // Their memory is cold: the one ahead comes while this one is looked at.
        if (t + 8 < num_tensors) __builtin_prefetch(tensors[t + 8]);
        if (api->dltensor_from_py_object(tensors[t], &tensor)) return false;
        seen[t] = halfword::Seen(tensor);
    }
    return true;
}
