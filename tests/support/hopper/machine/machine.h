// What the text of a kernel may ask of the emulated machine: all that instructions.h and language.h are written with.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#pragma GCC visibility push(default)
namespace hopper {

struct Index {
    u32 x, y, z;
};
struct Place {  // of a thread
    Index thread, block, grid;
};
extern Place* place;  // of the thread that runs

struct BarrierName {  // where an mbarrier lies from the first multiple of 1024 on; a null name ends a list
    const char* name;
    u32 at;
};

// Within a warp: all of its threads have to come.
u32 shuffle(u32 value, u32 lane);
bool any(bool value);
void meet();

// Named barriers of a program, and the barrier of a cluster.
void barrier_sync(u32 id, u32 threads);
void barrier_arrive(u32 id, u32 threads);
void barrier_of_all();
void cluster_arrive();
void cluster_wait();
u32 cluster_rank();

// mbarriers. An address may be one of another program of the cluster (of_program).
u32 window();  // where dynamic shared memory begins
u32 of_program(u32 address, u32 rank);
void mbarrier_init(u32 bar, u32 arrivals);
void mbarriers_publish();
void mbarrier_arrive(u32 bar, int bytes);
void mbarrier_wait(u32 bar, u32 parity);

void write_word(u32 to, u32 value);
u32 read_word(u32 from);
void copy_tile(u32 to, const void* map, u32 bar, int column, int row, int head, int batch, u32 programs);

// wgmma of m64: `from` are this thread's registers of A, or null where A lies in shared memory.
struct Shape {
    u32 n;
    bool fp16, transposed;  // transposed: B is [k][n], n contiguous
};
void product_issue(Shape shape, float* sums, const u32* from, u64 a, u64 b, bool add);
void product_fence();
void product_commit();
void product_wait(u32 left);

void registers_give(u32 count);
void registers_take(u32 count);

u32 count_up(u32* at, u32 most);  // atomicInc
void check_aligned(const void* at, u32 bytes);

}  // namespace hopper
#pragma GCC visibility pop
