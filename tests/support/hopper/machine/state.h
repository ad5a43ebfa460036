// What the machine is made of: clusters of programs, their warpgroups, warps and threads, barriers, copies and products in flight.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "machine.h"

namespace hopper {

constexpr u32 WARP = 32, GROUP = 128;                                  // threads of a warp, of a warpgroup
constexpr u32 BLOCK = 1024;                                            // bytes of shared memory whose uses are recorded together
constexpr u32 REMOTE = 1u << 24;                                       // addresses of the program of rank r begin at (r + 1) * REMOTE
constexpr u32 MOST_WARPS = 32, MOST_BARRIERS = 32, SLOTS = MOST_WARPS + 2 * MOST_BARRIERS;  // of a cluster; barriers of a program
constexpr u32 REGISTERS = 65536, NAMED = 16;
constexpr u32 IN_FLIGHT = 0x7fbadbad;                                  // what registers hold that a product has not delivered: a NaN

// What has happened before: of every warp of the cluster how many of its releases, of every mbarrier how many phases.
struct Clock {
    u32 at[SLOTS] = {};

    void join(const Clock& other) {
        for (u32 i = 0; i < SLOTS; i++) at[i] = at[i] > other.at[i] ? at[i] : other.at[i];
    }
};

// Who last wrote some shared memory, and who has read it since.
struct Uses {
    bool written = false;
    u32 slot = 0, time = 0;
    u32 reads[MOST_WARPS] = {};
};

// Uses of 1024 bytes of shared memory: as a whole, or word by word from the first use of less on, until it is written as a whole again.
struct Block {
    Uses whole;
    std::vector<Uses> words;
};

enum Waits { FOR_NOTHING, FOR_OTHERS, FOR_WARP, FOR_PHASE, FOR_NAMED, FOR_CLUSTER, FOR_REGISTERS, FOR_PRODUCTS, ENDED };
enum Meeting { SHUFFLE, ANY, MEET };

struct Program;
struct Warp;

struct Stored {                        // shared memory that TMA reads, of a group of stores
    u32 from, to;
    u64 group;
};

struct Thread : Place {
    Program* program;
    Warp* warp;
    u32 lane;
    bool begun = false;
    char* stack;
    ucontext_t first;
    jmp_buf context;
    Waits waits = FOR_NOTHING;
    u32 bar = 0, parity = 0;           // awaited
    u64 generation = 0;
    u64 issued = 0, groups = 0;        // products
    bool fenced = false;
    u64 store_groups = 0;              // committed
    std::vector<Stored> stores;        // that nobody has waited for
};

// Sums of a warp, 16 rows, while products are in flight. They lie here and not in registers, which nobody may look at or change.
struct Sums {
    u32 n = 0;
    u64 last = 0;                      // the product after the last that adds to them
    float* registers[WARP] = {};
    float values[16][256];
};

struct Product {
    Shape shape;
    u64 a, b;
    bool add, from_registers;
    u32 issued = 0;                    // threads
    Sums* sums[GROUP / WARP] = {};
    bool is_there[GROUP / WARP] = {true, true, true, true};  // what it reads
    const u32* from[GROUP] = {};
    u32 words[GROUP][4];               // A, where it lies in registers
};

struct Warp {
    Program* program;
    u32 index, slot;                   // in the program; in clocks
    u32 group;
    std::vector<Thread*> threads;
    u32 ended = 0;
    u64 seen = 0;                      // the cluster's version when no thread could go on
    u32 priority = 0, product_priority = 0;
    Meeting meeting = MEET;
    u32 met = 0, given[WARP] = {}, lane[WARP] = {}, result[WARP] = {};
    u64 meetings = 0;
    u64 executed = 0, delivered = 0;   // products
    std::vector<std::unique_ptr<Sums>> sums;
    u32 registers = 0;
};

struct Warpgroup {
    std::deque<Product> products;
    u64 first = 0;                     // number of the oldest of them
    std::vector<u64> ends;             // of groups: products before each one's end
};

struct Mbarrier {
    u32 slot = 0, arrivals = 0, pending = 0, phases = 0;
    int bytes = 0;
    bool published = false;            // to other programs and to TMA
    u32 by = 0, time = 0;              // who made it, and when
    Clock arriving, completed;
};

struct Named {
    u32 threads = 0, arrived = 0;
    u64 generation = 0;
    std::vector<bool> who;
    Clock arriving, completed;
};

struct Cluster;

struct Program {
    Cluster* cluster;
    u32 rank, index;
    std::vector<unsigned char> shared;
    std::map<u32, Mbarrier> bars;      // by address
    Named named[NAMED];
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<Warpgroup> groups;
    std::vector<Block> blocks;
    u32 free_registers = 0, ended = 0;
};

struct Cluster {
    std::vector<std::unique_ptr<Program>> programs;
    u64 version = 1;                   // changes whenever some thread may be able to go on
    Clock clocks[MOST_WARPS];
    u32 arrived = 0;
    u64 generation = 0;
    Clock arriving, completed;
};

struct TensorMap {                     // driver.py writes it
    const unsigned char* address;
    u64 sizes[5], strides[4];
    u32 box[5];
    u32 rank, element, swizzle;

    u32 bytes() const {
        u32 count = element;
        for (u32 i = 0; i < rank; i++) count *= box[i];
        return count;
    }
};

enum Direction { LOAD, STORE, ADD };
struct Copy {
    Program* program;
    TensorMap map;
    u32 shared, bar;
    int at[5];
    u32 priority;
    Direction direction;
    Thread* by = nullptr;              // of a store, and its group
    u64 group = 0;
};

enum Timing { EAGER, LATE, RANDOM };

struct Machine {
    std::vector<std::unique_ptr<Cluster>> clusters;
    std::vector<Warp*> warps;
    std::deque<Copy> copies;
    Timing timing;
    u64 random;
    u32 turn = 0;
    void (*kernel)(const void*);
    const void* arguments;
    jmp_buf scheduler;
    std::string error;
    const BarrierName* names;
    u32 window;                        // where shared memory begins
    bool reads_early;                  // see check_read
};
extern Machine* machine;
extern Thread* current;

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
void wait_for(Waits what);
void preempt();
u32 draw();
std::string name_of(u32 bar);

inline void changed(Program& p) { p.cluster->version++; }
inline Clock& clock_of(const Warp& w) { return w.program->cluster->clocks[w.slot]; }

}  // namespace hopper
