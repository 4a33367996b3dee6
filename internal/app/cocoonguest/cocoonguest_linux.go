// Package cocoonguest wires the agent inside a VM: as PID 1 it brings the machine up first, elsewhere it serves as an
// ordinary service. It contains no behaviour of its own.
package cocoonguest

import (
	"context"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"time"

	"cocoonstack.io/cocoon/internal/guest/link"
	"cocoonstack.io/cocoon/internal/guestagent"
	"cocoonstack.io/cocoon/internal/guestagent/boot"
	"cocoonstack.io/cocoon/internal/guestagent/machine"
	"cocoonstack.io/cocoon/internal/guestagent/rooms"
	"cocoonstack.io/cocoon/internal/guestagent/volumes"
)

// version names the sources of this agent; guest/build.sh sets it.
var version = "unknown"

// buttonGrace is what the main process gets when the machine's power button is pressed.
const buttonGrace = 30 * time.Second

// Run is the agent. As PID 1 it does not return: whatever ends it powers the machine off.
func Run(ctx context.Context, console io.Writer) error {
	if os.Getpid() != 1 {
		return serve(ctx, boot.Result{}, false)
	}
	fmt.Fprintf(console, "cocoon-guest %s\n", version) // for whoever reads the serial log: the kernel is done, we begin
	err := asInit(ctx)
	if err != nil {
		fmt.Fprintf(console, "cocoon-guest: %v; powering off\n", err)
	}
	machine.PowerOff()
	return err
}

func asInit(ctx context.Context) error {
	debug.SetGCPercent(-1) // nothing of the boot is worth collecting
	result, err := boot.Root()
	if err != nil {
		return err
	}
	if err := machine.Loopback(); err != nil {
		return fmt.Errorf("bring up the loopback interface: %w", err)
	}
	return serve(ctx, result, true)
}

func serve(ctx context.Context, booted boot.Result, init bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	dev, err := link.OpenVirtio(link.PortName)
	if err != nil {
		return err
	}
	cfg := guestagent.Config{Version: version, Init: init}
	if init { // elsewhere the folders are somebody else's
		cfg.Volumes, cfg.Rooms = volumes.New(), rooms.New(booted.Disk)
	}
	srv := guestagent.New(cfg, machine.New(init, booted.Disk))
	done := make(chan struct{})
	defer func() { <-done }()
	defer cancel()
	go func() {
		defer close(done)
		if booted.Late != nil {
			_ = booted.Late() // a guest without entropy device, balloon or power button works
			boot.WatchPowerButton(ctx, func() { srv.PowerButton(buttonGrace) })
		}
	}()
	debug.SetGCPercent(100)
	return srv.Run(ctx, link.NewPort(dev))
}
