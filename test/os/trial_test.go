//go:build os

package appliance

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/appliance/bootctl"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// arm puts an update into slot b of a disk as one does that runs in slot a, with the boot files of the image.
func arm(t *testing.T, disk, id string, tries int) {
	t.Helper()
	esp, env := disk+"@@1M", filepath.Join(t.TempDir(), "grubenv")
	do(t, "mcopy", "-n", "-i", esp, "::/EFI/BOOT/grubenv", env)
	if err := bootctl.New(env, bootctl.Boot{Slot: bootctl.A}).Arm(bootctl.B, tries, id); err != nil {
		t.Fatal(err)
	}
	do(t, "mcopy", "-o", "-i", esp, env, "::/EFI/BOOT/grubenv")
	for _, name := range []string{"vmlinuz", "initramfs"} {
		do(t, "mcopy", "-i", esp, need.Built(t, "bin/os/"+name, "make os-image"), "::/"+name+"_b-"+id)
	}
}

func environment(t *testing.T, disk string) bootctl.State {
	t.Helper()
	env := filepath.Join(t.TempDir(), "grubenv")
	do(t, "mcopy", "-n", "-i", disk+"@@1M", "::/EFI/BOOT/grubenv", env)
	s, err := bootctl.New(env, bootctl.Boot{}).Read()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// An update whose slot is damaged is tried twice, and then the good slot runs, without anybody at the console.
func TestTrial(t *testing.T) {
	image := disk(t)
	arm(t, image, "broken", 2)
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	const slotB = (2048 + 256*2048 + 2048*2048) * 512
	_, err = f.WriteAt(make([]byte, 4096), slotB)
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	m, cmd := firmware(t, image, true)
	const try = "slot b, files broken capsule.trial=1"
	text := m.wait(m.serial, try, "is no squashfs", "this is a trial: restarting", try, "this is a trial: restarting", "slot a, files", "Cocoon OS", "10.0.2.15:50000")
	t.Logf("%s from power on, by two trials, to the good slot's address", time.Since(m.begin).Round(time.Second))
	if n := strings.Count(text, try); n != 2 {
		t.Errorf("%d trials", n)
	}
	m.off(cmd)
	if s := environment(t, image); s.Good != bootctl.A || s.Try != bootctl.B || s.Tries != 0 || s.UID != "broken" {
		t.Errorf("the environment is %+v", s)
	}
}

// An update that starts knows that it is on trial, and uses up one try.
func TestTrialThatStarts(t *testing.T) {
	image := disk(t)
	arm(t, image, "next", 2)
	m, cmd := firmware(t, image, false)
	m.wait(m.serial, "slot b, files next capsule.trial=1", "root is /dev/vda3", "slot=b trial=true", "Cocoon OS", "slot b", "10.0.2.15:50000")
	m.off(cmd)
	if s := environment(t, image); s.Good != bootctl.A || s.Try != bootctl.B || s.Tries != 1 {
		t.Errorf("the environment is %+v", s)
	}
}
