package machine

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/filesystem/ext4"
	"cocoonstack.io/cocoon/internal/guestagent"
)

// From linux/random.h.
const (
	rndAddEntropy = 0x40085203
	rndReseedCRNG = 0x5207
)

// clockSlack is how far the clock may be wrong before it is set: setting it makes a jump, and programs may see time go
// back.
const clockSlack = 5 * time.Millisecond

// Resume implements guestagent.Machine. What programs could share with the source is changed first: random numbers,
// then the time.
func (m *Machine) Resume(ctx context.Context, r guestagent.Resumption) error {
	if err := m.reseed(r.Entropy); err != nil {
		return err
	}
	if err := setClock(r.Now); err != nil {
		return err
	}
	if err := setHostname(r.Hostname); err != nil {
		return err
	}
	var olds []string
	if r.Clone != nil {
		olds = r.Clone.MACs
		if err := m.writeMachineID(r.Clone.MachineID); err != nil {
			return err
		}
	}
	if err := m.configure(ctx, r.NICs, olds); err != nil {
		return err
	}
	if err := m.writeFiles(r.Identity, (*kept).write); err != nil {
		return err
	}
	return m.grow(ctx, r.Storage)
}

// growPatience is the timeout for the kernel to learn that its disk has grown.
const growPatience = 10 * time.Second

// grow waits until the writable disk has size bytes (0: unchanged), and extends its file system to all of it. A disk
// that is not ours is left alone.
func (m *Machine) grow(ctx context.Context, size int64) error {
	if size == 0 || m.disk == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, growPatience)
	defer cancel()
	if err := ext4.Await(ctx, m.disk, size); err != nil {
		return err
	}
	return ext4.Grow(m.disk)
}

// Forget implements guestagent.Machine.
func (m *Machine) Forget() error {
	var errs []error
	for i := range m.files {
		errs = append(errs, m.files[i].trim())
	}
	return errors.Join(append(errs, forget(m.root+"/"))...)
}

// random opens the device that reseed needs and keeps it open: in a guest with cold code, opening it is most of the
// work.
func (m *Machine) random() (fd int, err error) {
	if m.urandom == 0 {
		if fd, err = unix.Open("/dev/urandom", unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
			return -1, fmt.Errorf("reseed the random numbers: %w", err)
		}
		m.urandom = fd
	}
	return m.urandom, nil
}

// reseed adds entropy to the kernel's random numbers and makes every generator restart from them.
func (m *Machine) reseed(entropy []byte) error {
	if len(entropy) == 0 {
		return nil
	}
	fd, err := m.random()
	if err != nil {
		return err
	}
	// struct rand_pool_info: entropy in bits, bytes that follow
	pool := make([]byte, 8, 8+len(entropy))
	binary.NativeEndian.PutUint32(pool, uint32(len(entropy)*8))
	binary.NativeEndian.PutUint32(pool[4:], uint32(len(entropy)))
	pool = append(pool, entropy...)
	defer clear(pool)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), rndAddEntropy, uintptr(unsafe.Pointer(&pool[0]))); errno != 0 {
		return fmt.Errorf("add to the random numbers: %w", errno)
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), rndReseedCRNG, 0); errno != 0 {
		return fmt.Errorf("reseed the random numbers: %w", errno)
	}
	return nil
}

// SetClock implements guestagent.Machine.
func (m *Machine) SetClock(now time.Time) error { return setClock(now) }

func setClock(now time.Time) error {
	if now.IsZero() {
		return nil
	}
	if off := time.Until(now); off > -clockSlack && off < clockSlack {
		return nil
	}
	ts := unix.NsecToTimespec(now.UnixNano())
	if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
		return fmt.Errorf("set the clock: %w", err)
	}
	return nil
}

// writeMachineID sets the machine id, also in D-Bus's own copy.
func (m *Machine) writeMachineID(id string) error {
	if id == "" {
		return nil
	}
	for _, file := range []int{fileMachineID, fileDBusID} {
		if err := m.files[file].write(id + "\n"); err != nil {
			return fmt.Errorf("write the machine id: %w", err)
		}
	}
	return nil
}

// sources are the files that would restore the old identity or random numbers of the machine: leases of DHCP clients,
// and the seed that systemd keeps from boot to boot.
var sources = []struct{ dir, pattern string }{
	{"var/lib/dhcp", "*.lease*"},
	{"var/lib/dhclient", "*.lease*"},
	{"var/lib/dhcpcd", "*.lease*"},
	{"var/lib/NetworkManager", "*.lease"},
	{"run/systemd/netif/leases", "*"},
	{"var/lib/systemd", "random-seed"},
}

// forget removes sources.
func forget(root string) error {
	for _, s := range sources {
		dir := filepath.Join(root, s.dir)
		entries, err := os.ReadDir(dir)
		if err != nil {
			continue // this guest has no such files
		}
		for _, e := range entries {
			if ok, _ := filepath.Match(s.pattern, e.Name()); !ok || e.IsDir() {
				continue
			}
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("remove the old identity of the machine: %w", err)
			}
		}
	}
	return nil
}
