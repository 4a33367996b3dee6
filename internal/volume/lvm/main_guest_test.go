//go:build lvmguest

package lvm_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/volume/lvm"
	"cocoonstack.io/cocoon/internal/volume/volumetest"
)

const (
	mib  = volumetest.MiB
	pool = "vg/pool"

	// childDir is set in processes that are killed; see crash_guest_test.go.
	childDir = "COCOON_TEST_LVM_DIR"
)

// wrapper stands before the real lvm: it kills the process that has started it, before or after the command with a number.
const wrapper = `#!/bin/sh
if [ -e /wrap/kill ]; then
	read -r when number </wrap/kill
	count=$(($(cat /wrap/count) + 1))
	echo $count >/wrap/count
	if [ $count = $number ]; then
		rm /wrap/kill
		case $when in
		before)
			kill -9 $PPID
			usleep 300000
			exec /sbin/lvm "$@"
			;;
		after)
			/sbin/lvm "$@"
			kill -9 $PPID
			exit
			;;
		esac
	fi
fi
exec /sbin/lvm "$@"
`

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		if err := act(context.Background(), dir, os.Args[len(os.Args)-1]); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if err := prepare(); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// prepare makes the pool. Its extents are as small as the blocks of volumes, so that the suite can use any size.
func prepare() error {
	if err := os.Setenv("PATH", "/wrap:"+os.Getenv("PATH")); err != nil {
		return err
	}
	if err := os.Mkdir("/wrap", 0o700); err != nil {
		return err
	}
	if err := os.WriteFile("/wrap/lvm", []byte(wrapper), 0o700); err != nil { //nolint:gosec // a program
		return err
	}
	for _, args := range [][]string{
		{"pvcreate", "-q", "/dev/vda"},
		{"vgcreate", "-q", "-s", "4k", "vg", "/dev/vda"},
		{"lvcreate", "-q", "-y", "-L", "256m", "-c", "64k", "-T", pool},
	} {
		if _, err := run(args...); err != nil {
			return err
		}
	}
	return nil
}

func run(args ...string) (string, error) {
	out, err := exec.Command("/sbin/lvm", args...).CombinedOutput() //nolint:noctx // it ends with the machine
	if err != nil {
		return "", fmt.Errorf("lvm %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

// command runs an lvm beside the store.
func command(t *testing.T, args ...string) string {
	t.Helper()
	out, err := run(args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// logicals returns the names of all logical volumes except the pool.
func logicals(t *testing.T) []string {
	t.Helper()
	return strings.Fields(command(t, "lvs", "--noheadings", "-o", "lv_name", "--select", "lv_name!=pool", "vg"))
}

// store is a store and how to open it again.
type store struct {
	*lvm.Store
	cfg lvm.Config
	log *bytes.Buffer
}

func open(t *testing.T, cfg lvm.Config) *store {
	t.Helper()
	log := &bytes.Buffer{}
	cfg.Log = slog.New(slog.NewTextHandler(log, nil))
	if cfg.Pool == "" {
		cfg.Pool = pool
	}
	s, err := lvm.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &store{Store: s, cfg: cfg, log: log}
}

// fresh is an empty store. The test leaves none of its logical volumes.
func fresh(t *testing.T) *store {
	t.Helper()
	s := open(t, lvm.Config{Dir: filepath.Join(t.TempDir(), "store")})
	t.Cleanup(func() {
		s.Close()
		clear(t)
	})
	return s
}

func clear(t *testing.T) {
	t.Helper()
	command(t, "lvremove", "-q", "-y", "--select", "lv_name!=pool", "vg")
	_ = os.Remove("/wrap/kill")
}

// again opens the store as the next process does.
func (s *store) again(t *testing.T) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	*s = *open(t, s.cfg)
}
