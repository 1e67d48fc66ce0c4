// Runs a CUDA C++ kernel on the CPU, unchanged: each thread of a block is a fiber, and
// __syncthreads() goes on to the next one. Blocks run one after another. Enough of CUDA for kernels
// that use shared memory and barriers, and no warp intrinsics or atomics.
//
// Between two barriers the fibers run in an order drawn from `seed`, so that a missing barrier shows.
// A barrier that only some threads reach is reported (status 1).

#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

struct Index {
    int x;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

namespace simt {
constexpr size_t STACK = 64 << 10;
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK);
    bool done = false, waiting = false;
};
static ucontext_t scheduler;
static Fiber* current;
static void (*kernel)(long long, int, int);
static long long argument;
static int first_level, last_level;

static void enter() {
    kernel(argument, first_level, last_level);
    current->done = true;
    swapcontext(&current->context, &scheduler);
}

static int run_block(int threads, std::mt19937& order) {
    std::vector<Fiber> fibers(threads);
    for (auto& f : fibers) {
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data();
        f.context.uc_stack.ss_size = STACK;
        f.context.uc_link = nullptr;
        makecontext(&f.context, enter, 0);
    }
    std::vector<int> turn(threads);
    std::iota(turn.begin(), turn.end(), 0);
    for (;;) {
        std::shuffle(turn.begin(), turn.end(), order);
        int done = 0;
        for (int t : turn) {
            current = &fibers[t];
            threadIdx.x = t;
            if (!current->done) swapcontext(&scheduler, &current->context);
            done += current->done;
        }
        if (done == threads) return 0;
        if (done) return 1;  // some threads left, others wait at a barrier
    }
}
}  // namespace simt

static void __syncthreads() {
    const int mine = threadIdx.x;
    swapcontext(&simt::current->context, &simt::scheduler);
    threadIdx.x = mine;
}

extern "C" void stepgraph_step(long long ctx, int first, int last);

extern "C" int simt_launch(long long ctx, int first, int last, int blocks, int threads, int seed) {
    std::mt19937 order(seed);
    simt::kernel = stepgraph_step;
    simt::argument = ctx, simt::first_level = first, simt::last_level = last;
    blockDim.x = threads, gridDim.x = blocks;
    for (int b = 0; b < blocks; b++) {
        blockIdx.x = b;
        if (simt::run_block(threads, order)) return 1;
    }
    return 0;
}
