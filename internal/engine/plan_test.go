package engine

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestStopped(t *testing.T) {
	for name, tt := range map[string]struct {
		reason string // set while it ran
		how    ending
		want   string
	}{
		"asked":               {how: ending{asked: true}, want: vm.ReasonStopped},
		"killed":              {how: ending{asked: true, killed: true}, want: vm.ReasonKilled},
		"powered off":         {how: ending{exit: hypervisor.Exit{GuestShutdown: true}}, want: vm.ReasonPoweredOff},
		"reset":               {how: ending{exit: hypervisor.Exit{GuestReset: true}}, want: vm.ReasonCrashed},
		"signal":              {how: ending{exit: hypervisor.Exit{Signal: 11, Code: -1}}, want: vm.ReasonCrashed},
		"code":                {how: ending{exit: hypervisor.Exit{Code: 1}}, want: vm.ReasonCrashed},
		"unknown":             {how: ending{exit: hypervisor.Exit{Code: -1}}, want: vm.ReasonCrashed},
		"lost":                {how: ending{lost: true}, want: vm.ReasonLost},
		"exited, then killed": {reason: vm.ReasonExited, how: ending{asked: true, killed: true}, want: vm.ReasonExited},
		"not set up":          {reason: vm.ReasonStartFailed, how: ending{exit: hypervisor.Exit{Signal: 9}}, want: vm.ReasonStartFailed},
	} {
		r := vm.Record{State: vm.StateRunning, PID: 7, Handle: []byte("h"), AgentReady: true, Reason: tt.reason}
		at := time.Unix(9, 0)
		stopped(&r, tt.how, at)
		if r.Reason != tt.want || r.State != vm.StateStopped || r.PID != 0 || r.Handle != nil || r.AgentReady || r.StoppedAt != at {
			t.Errorf("%s: got %+v, want reason %s", name, r, tt.want)
		}
	}
}

func TestStarted(t *testing.T) {
	code := 1
	r := vm.Record{State: vm.StateStopped, Reason: vm.ReasonExited, Message: "x", ExitCode: &code}
	started(&r, []byte("h"), 7, time.Unix(1, 0))
	if r.Restarts != 0 || r.Reason != "" || r.Message != "" || r.ExitCode != nil || r.PID != 7 || !r.FirstBooted {
		t.Errorf("first start: %+v", r)
	}
	started(&r, []byte("h"), 8, time.Unix(2, 0))
	if r.Restarts != 1 {
		t.Errorf("second start: %+v", r)
	}
}

func TestNodeWithoutNetwork(t *testing.T) {
	e := newNode(Config{DefaultDriver: "d"}, Deps{Drivers: map[string]hypervisor.Driver{"d": nopDriver{}}})
	disk := image.Image{Type: vm.ImageDisk}
	r, err := e.design(vm.Spec{Image: "x", NICs: []vm.NICSpec{{}}}, disk)
	if err != nil || len(r.Spec.NICs) != 0 {
		t.Errorf("interface on no network: %+v, %v", r.Spec.NICs, err)
	}
	if _, err := e.design(vm.Spec{Image: "x", NICs: []vm.NICSpec{{Network: "lan"}}}, disk); !errdefs.IsInvalid(err) {
		t.Errorf("interface on a network that is not there: %v", err)
	}
}

// nopDriver is a driver that is never used.
type nopDriver struct{ hypervisor.Driver }

func TestCloudInitIsForDiskImages(t *testing.T) {
	e := newNode(Config{DefaultDriver: "d", Kernel: "k"}, Deps{Drivers: map[string]hypervisor.Driver{"d": nopDriver{}}})
	spec := vm.Spec{Image: "x", CloudInit: &vm.CloudInit{}}
	if _, err := e.design(spec, image.Image{Type: vm.ImageDisk}); err != nil {
		t.Error(err)
	}
	oci := image.Image{Type: vm.ImageOCI, Config: vm.Process{Entrypoint: []string{"sh"}}}
	if _, err := e.design(spec, oci); !errdefs.IsInvalid(err) {
		t.Errorf("cloud-init of a container image: %v", err)
	}
	spec.CloudInit.UserData = "nothing known"
	if _, err := e.design(spec, image.Image{Type: vm.ImageDisk}); !errdefs.IsInvalid(err) {
		t.Errorf("bad user data: %v", err)
	}
}

func TestQueueIsFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q queue
		release, err := q.acquire(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		var mu sync.Mutex
		var order []int
		impatient, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var wg sync.WaitGroup
		for i := range 5 {
			ctx := t.Context()
			if i == 2 {
				ctx = impatient
			}
			wg.Go(func() {
				release, err := q.acquire(ctx, "a")
				if err != nil {
					return
				}
				defer release()
				mu.Lock()
				defer mu.Unlock()
				order = append(order, i)
			})
			synctest.Wait() // until it waits in line
		}
		other, err := q.acquire(t.Context(), "b")
		if err != nil {
			t.Fatal(err)
		}
		other()
		<-time.After(2 * time.Second) // of the bubble: the impatient caller leaves
		release()
		wg.Wait()
		if len(order) != 4 || order[0] != 0 || order[1] != 1 || order[2] != 3 || order[3] != 4 {
			t.Errorf("order %v", order)
		}
		if len(q.waiting) != 0 {
			t.Errorf("the queue keeps %v", q.waiting)
		}
	})
}

// based is a store whose images have layers.
type based struct {
	image.Store
	layers map[string][]string
}

func (b based) Base(_ context.Context, img image.Image) (disks []vm.Disk, err error) {
	for n, path := range b.layers[img.ID] {
		disks = append(disks, vm.Disk{Path: path, Role: vm.RoleLayer, Serial: image.SerialLayer(n), ReadOnly: true})
	}
	return disks, nil
}

func TestContainersShareLayers(t *testing.T) {
	e := &node{images: based{layers: map[string][]string{"a": {"base", "a"}, "b": {"base", "b", "c"}}}}
	disks, _ := e.images.Base(t.Context(), image.Image{ID: "a"})
	disks = append(disks, vm.Disk{Path: "cow", Role: vm.RoleCOW, Serial: image.SerialCOW})
	containers := []vm.ContainerRecord{{Name: "x"}, {Name: "y"}, {Name: "z"}}
	disks, err := e.layContainers(t.Context(), containers, []image.Image{{ID: "a"}, {ID: "b"}, {ID: "b"}}, disks)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, d := range disks {
		got = append(got, d.Path+"="+d.Serial)
	}
	want := []string{"base=cocoon-l000", "a=cocoon-l001", "cow=cocoon-cow", "b=cocoon-i000", "c=cocoon-i001"}
	if !slices.Equal(got, want) {
		t.Errorf("disks %q, want %q", got, want)
	}
	for i, want := range [][]string{{"cocoon-l000", "cocoon-l001"}, {"cocoon-l000", "cocoon-i000", "cocoon-i001"}, {"cocoon-l000", "cocoon-i000", "cocoon-i001"}} {
		if !slices.Equal(containers[i].Layers, want) {
			t.Errorf("container %s stands on %q, want %q", containers[i].Name, containers[i].Layers, want)
		}
	}
}
