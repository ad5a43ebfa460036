// Global memory: every tensor has pages of its own, which end where it ends; behind them, and before them, is much that nobody may touch.
#pragma once
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "state.h"

namespace hopper {

struct Region {
    char *pages, *tensor;
    size_t size, bytes;                // of the pages; of the tensor
};
constexpr size_t FORBIDDEN = 1 << 24;  // bytes at either end: a tile of rows that do not exist is far away
inline std::vector<Region> regions;

inline size_t page() { return sysconf(_SC_PAGESIZE); }

// Room for a tensor. Its first byte lies on as many bytes as that of the tensor at `like` does, up to 16.
extern "C" __attribute__((visibility("default"))) void* give_memory(size_t like, size_t bytes) {
    const size_t size = (bytes + 16 + page() - 1) / page() * page();
    char* pages = (char*)mmap(nullptr, size + 2 * FORBIDDEN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) + FORBIDDEN;
    mprotect(pages, size, PROT_READ | PROT_WRITE);
    const size_t last = (size_t)pages + size - bytes;
    char* tensor = (char*)(last - (last - like) % 16);
    regions.push_back({pages, tensor, size, bytes});
    return tensor;
}
extern "C" __attribute__((visibility("default"))) void take_memory() {
    for (const Region& r : regions) munmap(r.pages - FORBIDDEN, r.size + 2 * FORBIDDEN);
    regions.clear();
}

inline void forbidden(int, siginfo_t* info, void*) {
    const char* at = (const char*)info->si_addr;
    for (const Region& r : regions)
        if (at >= r.pages - FORBIDDEN && at < r.pages + r.size + FORBIDDEN)
            fail("thread %u of program %u touches byte %td of a tensor of %zu bytes", current->thread.x, current->program->index, at - r.tensor, r.bytes);
    for (const Thread& t : current->program->threads)
        if (at >= t.stack && at < t.stack + page()) fail("thread %u needs more stack than there is", t.thread.x);
    signal(SIGSEGV, SIG_DFL);          // our own mistake: happens again, and ends the process
}

// While a grid runs, what is touched and forbidden is the kernel's mistake.
struct Guard {
    struct sigaction before;
    stack_t stack_before;

    Guard() {
        static char room[64 * 1024];
        stack_t own = {};
        own.ss_sp = room, own.ss_size = sizeof(room);
        sigaltstack(&own, &stack_before);
        struct sigaction action = {};
        action.sa_sigaction = forbidden;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(SIGSEGV, &action, &before);
    }
    ~Guard() {
        sigaction(SIGSEGV, &before, nullptr);
        sigaltstack(&stack_before, nullptr);
    }
};

}  // namespace hopper
