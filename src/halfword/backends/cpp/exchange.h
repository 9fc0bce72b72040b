// What Python's tensors are, through the exchange interface of dlpack.h 1.3: a C ABI, which torch
// offers on its type. Names are shortened, and what is not used has no type.

#pragma once

#include <cstdint>

namespace halfword {

struct DLTensor {
    void* data;
    std::int32_t device_type, device_id;
    std::int32_t ndim;
    std::uint8_t dtype_code, dtype_bits;
    std::uint16_t dtype_lanes;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
};

struct DLPackExchangeAPI {
    std::uint32_t major, minor;
    void* prev_api;
    void* managed_tensor_allocator;
    void* managed_tensor_from_py_object;
    void* managed_tensor_to_py_object;
    int (*dltensor_from_py_object)(void* tensor, DLTensor* out);
    void* current_work_stream;
};

struct Seen {
    std::uint64_t address, numel, kind;

    explicit Seen(const DLTensor& tensor)
        : address(reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset), numel(1) {
        bool is_contiguous = true;
        for (int d = tensor.ndim - 1; d >= 0; --d) {
            const auto size = static_cast<std::uint64_t>(tensor.shape[d]);
            const auto stride = static_cast<std::uint64_t>(tensor.strides[d]);
            is_contiguous &= size == 1 || stride == numel;
            numel *= size;
        }
        is_contiguous |= numel == 0;
        // The storage of a tensor that has elements may have been freed in place.
        const std::uint64_t is_readable = is_contiguous && (address || !numel);
        kind = is_readable | std::uint64_t{tensor.dtype_code} << 8 |
               std::uint64_t{tensor.dtype_bits} << 16 |
               static_cast<std::uint64_t>(tensor.device_type) << 24 |
               static_cast<std::uint64_t>(tensor.device_id) << 32;
    }
};

}  // namespace halfword
