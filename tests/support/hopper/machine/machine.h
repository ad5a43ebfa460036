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
u32 any_bits(u32 value);  // those that some thread has
inline bool any(bool value) { return any_bits(value) != 0; }
void meet();
void let_others_come();  // the other threads go on until they wait for something

// Named barriers of a program, and the barrier of a cluster.
void barrier_sync(u32 id, u32 threads);
void barrier_arrive(u32 id, u32 threads);
void barrier_of_all(u32 id = 0);
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

// Shared memory. A use lies within 4 bytes.
void write_shared(u32 to, const void* value, u32 bytes);
void read_shared(u32 from, void* value, u32 bytes);

// Tiles of a tensor, by TMA. `at`: coordinates, columns first.
void load_tile(u32 to, const void* map, u32 bar, const int* at, u32 programs);
void store_tile(u32 from, const void* map, const int* at, bool add);
void stores_commit();
void stores_wait(u32 left);

// wgmma of m64: `from` are this thread's registers of A, or null where A lies in shared memory; `watched`: they lie there until the product is awaited.
struct Shape {
    u32 n;
    bool fp16, transposed, a_transposed;  // transposed: B is [k][n], n contiguous, or A is [k][m]
};
void product_issue(Shape shape, float* sums, const u32* from, bool watched, u64 a, u64 b, bool add);
void product_fence();
void product_commit();
void product_wait(u32 left);

void registers_give(u32 count);
void registers_take(u32 count);

u32 count_up(u32* at, u32 most);  // atomicInc
void check_aligned(const void* at, u32 bytes);

}  // namespace hopper
#pragma GCC visibility pop
