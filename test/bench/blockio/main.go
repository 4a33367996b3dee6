// Command blockio measures a block device from inside a guest: large sequential and small random requests, unbuffered. It overwrites the
// device. It prints the times as JSON. With "wait" it only waits: the main process of a guest in which it is run later.
package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Sizes in bytes of one request, and of all requests of one measurement.
const (
	large, largeTotal = 1 << 20, 128 << 20
	small, smallTotal = 4 << 10, 8 << 20
)

// Times are how long the requests of each kind took, in nanoseconds.
type Times struct {
	Write       time.Duration `json:"write"`
	Read        time.Duration `json:"read"`
	RandomWrite time.Duration `json:"random_write"`
	RandomRead  time.Duration `json:"random_read"`
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: blockio DEVICE|wait")
		os.Exit(2)
	}
	if os.Args[1] == "wait" {
		_ = unix.Pause()
		return
	}
	times, err := measure(os.Args[1])
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(times)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "blockio: %v\n", err)
		os.Exit(1)
	}
}

func measure(device string) (t Times, err error) {
	f, err := os.OpenFile(device, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		return t, err
	}
	defer f.Close()
	buffer, err := unix.Mmap(-1, 0, large, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON) // aligned, as O_DIRECT needs it
	if err != nil {
		return t, err
	}
	for i := range buffer {
		buffer[i] = byte(i)
	}
	order := rand.New(rand.NewPCG(1, 2)).Perm(largeTotal / small) // the same in each guest
	sequential := func(n int) int64 { return int64(n) * large }
	random := func(n int) int64 { return int64(order[n]) * small }
	for _, m := range []struct {
		took  *time.Duration
		do    func([]byte, int64) (int, error)
		size  int
		count int
		at    func(n int) int64
	}{
		{&t.Write, f.WriteAt, large, largeTotal / large, sequential},
		{&t.Read, f.ReadAt, large, largeTotal / large, sequential},
		{&t.RandomWrite, f.WriteAt, small, smallTotal / small, random},
		{&t.RandomRead, f.ReadAt, small, smallTotal / small, random},
	} {
		began := time.Now()
		for n := range m.count {
			if _, err := m.do(buffer[:m.size], m.at(n)); err != nil {
				return t, err
			}
		}
		if err := f.Sync(); err != nil {
			return t, err
		}
		*m.took = time.Since(began)
	}
	return t, nil
}
