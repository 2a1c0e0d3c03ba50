// Launches a kernel block after block, each with shared memory that starts as NaN.
#pragma once
#include <algorithm>
#include <tuple>
#include <utility>

#include "copies.hpp"

namespace emu {

template <class... Args>
void launch(void (*kernel)(Args...), dim3 grid, dim3 threads, size_t shared, uint64_t seed, void** pointers) {
    if (shared > kSharedBytes)
        throw std::runtime_error("a block asks for " + std::to_string(shared) + " bytes of shared memory; SM120 has " +
                                 std::to_string(kSharedBytes));
    std::tuple<Args...> args = [&]<size_t... I>(std::index_sequence<I...>) {
        return std::tuple<Args...>{*static_cast<Args*>(pointers[I])...};
    }(std::index_sequence_for<Args...>{});
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                std::fill(std::begin(memory), std::end(memory), 0xFF);
                phase_barriers.clear();
                const uint64_t number = seed + (uint64_t(z) * grid.y + y) * grid.x + x;
                land_at_once = number % 2;
                blockIdx = {x, y, z};
                blockDim = threads;
                gridDim = grid;
                Block(threads, number).run([&] { std::apply(kernel, args); });
            }
}

}  // namespace emu
