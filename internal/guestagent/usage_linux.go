package guestagent

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
)

// This file reads the resource usage of containers and the pressure stall information of the kernel.

// usage is what the containers use, or have used; containers with unknown usage are left out. written returns what one has written to its disk, as far as
// that is known.
func (p *containers) usage(written func(container string) (bytes, inodes int64, known bool)) (out []*guestv1.ContainerStats) {
	if p == nil {
		return nil
	}
	for _, c := range p.list() {
		if c.command.cgroup == nil {
			continue
		}
		used, err := cgroupUsage(*c.command.cgroup)
		if err != nil {
			continue
		}
		used.Name = c.name
		if size, inodes, known := written(c.name); known {
			used.Written = &guestv1.DiskUse{Bytes: size, Inodes: inodes}
		}
		out = append(out, used)
	}
	return out
}

// cgroupUsage returns what the processes of a control group use, and have used.
func cgroupUsage(dir int) (*guestv1.ContainerStats, error) {
	stat, err := readCgroup(dir, "cpu.stat")
	if err != nil {
		return nil, err
	}
	usec, ok := keyed(stat, "usage_usec")
	if !ok {
		return nil, errors.New("cpu.stat has no usage_usec")
	}
	current, err := readCgroup(dir, "memory.current")
	if err != nil {
		return nil, err
	}
	memory, err := strconv.ParseInt(string(bytes.TrimSpace(current)), 10, 64)
	if err != nil {
		return nil, fmt.Errorf("memory.current: %w", err)
	}
	if stat, err = readCgroup(dir, "memory.stat"); err != nil {
		return nil, err
	}
	of := func(key string) int64 {
		n, _ := keyed(stat, key)
		return n
	}
	return &guestv1.ContainerStats{
		CpuSeconds: (time.Duration(usec) * time.Microsecond).Seconds(), MemoryTotal: memory, Memory: max(memory-of("inactive_file"), 0),
		Anonymous: of("anon"), PageFaults: of("pgfault"), MajorFaults: of("pgmajfault"),
		Pressure: pressure(func(resource string) ([]byte, error) { return readCgroup(dir, resource+".pressure") }),
	}, nil
}

// pressure reads how long programs have waited for each resource; nil if the kernel does not tell.
func pressure(read func(resource string) ([]byte, error)) *guestv1.Pressure {
	stall := func(resource string) *guestv1.Stall {
		text, err := read(resource)
		if err != nil {
			return nil
		}
		return parseStall(text)
	}
	p := &guestv1.Pressure{Cpu: stall("cpu"), Memory: stall("memory"), Io: stall("io")}
	if p.Cpu == nil && p.Memory == nil && p.Io == nil {
		return nil
	}
	return p
}

// guestPressure is pressure of the whole guest.
func guestPressure(proc string) *guestv1.Pressure {
	return pressure(func(resource string) ([]byte, error) { return os.ReadFile(filepath.Join(proc, "pressure", resource)) })
}

// parseStall reads a file of pressure stall information (accounting/psi.rst of the kernel): lines such as
// "some avg10=0.12 avg60=0.00 avg300=0.00 total=12345", the total in microseconds.
func parseStall(text []byte) *guestv1.Stall {
	s := &guestv1.Stall{}
	for line := range strings.Lines(string(text)) {
		w := &guestv1.Waits{}
		kind, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		for field := range strings.FieldsSeq(rest) {
			name, value, _ := strings.Cut(field, "=")
			n, _ := strconv.ParseFloat(value, 64)
			switch name {
			case "avg10":
				w.Avg10 = n
			case "avg60":
				w.Avg60 = n
			case "avg300":
				w.Avg300 = n
			case "total":
				usec, _ := strconv.ParseInt(value, 10, 64)
				w.TotalNs = usec * int64(time.Microsecond)
			}
		}
		switch kind {
		case "some":
			s.Some = w
		case "full":
			s.Full = w
		}
	}
	return s
}
