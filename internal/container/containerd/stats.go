package containerd

import (
	"context"
	"syscall"
	"time"

	cgroup1 "github.com/containerd/cgroups/v3/cgroup1/stats"
	cgroup2 "github.com/containerd/cgroups/v3/cgroup2/stats"
	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/typeurl/v2"

	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Stats implements container.Access.
func (r *Runtime) Stats(ctx context.Context, id string) (container.Stats, error) {
	c, err := r.Inspect(ctx, id)
	if err != nil {
		return container.Stats{}, err
	}
	if c.State.Phase != container.Running {
		return container.Stats{}, errdefs.Preconditionf("stats of container %s: it does not run", id)
	}
	s, _, err := r.metrics(ctx, id)
	return s, err
}

// oom reports whether a main process that ended with code was killed because memory was used up. Its cgroup is there as long as its task.
func (r *Runtime) oom(ctx context.Context, id string, code int) bool {
	if code != 128+int(syscall.SIGKILL) {
		return false
	}
	_, kills, err := r.metrics(ctx, id)
	if err != nil {
		r.cfg.Log.Warn("not known whether a container was killed for memory", "container", id, "err", err)
	}
	return kills > 0
}

// metrics returns what a container uses, and how many of its processes were killed because its memory was used up.
func (r *Runtime) metrics(ctx context.Context, id string) (container.Stats, uint64, error) {
	m, err := r.client.TaskService().Metrics(ctx, &tasks.MetricsRequest{Filters: []string{"id==" + id}})
	if err != nil {
		return container.Stats{}, 0, failed(err, "stats of container %s", id)
	}
	for _, one := range m.GetMetrics() {
		v, err := typeurl.UnmarshalAny(one.GetData())
		if err != nil {
			return container.Stats{}, 0, failed(err, "stats of container %s", id)
		}
		switch v := v.(type) {
		case *cgroup1.Metrics:
			return stats1(v), v.GetMemoryOomControl().GetOomKill(), nil
		case *cgroup2.Metrics:
			return stats2(v), v.GetMemoryEvents().GetOomKill(), nil
		}
	}
	return container.Stats{}, 0, errdefs.Preconditionf("stats of container %s: it does not run", id)
}

func stats1(m *cgroup1.Metrics) container.Stats {
	s := container.Stats{
		CPU: time.Duration(m.GetCPU().GetUsage().GetTotal()), MemoryTotal: int64(m.GetMemory().GetUsage().GetUsage()),
		PIDs: int64(m.GetPids().GetCurrent()),
	}
	s.Memory = max(s.MemoryTotal-int64(m.GetMemory().GetTotalInactiveFile()), 0)
	for _, e := range m.GetBlkio().GetIoServiceBytesRecursive() {
		switch e.GetOp() {
		case "Read":
			s.Read += int64(e.GetValue())
		case "Write":
			s.Written += int64(e.GetValue())
		}
	}
	return s
}

func stats2(m *cgroup2.Metrics) container.Stats {
	s := container.Stats{
		CPU: time.Duration(m.GetCPU().GetUsageUsec()) * time.Microsecond, MemoryTotal: int64(m.GetMemory().GetUsage()),
		PIDs: int64(m.GetPids().GetCurrent()),
	}
	s.Memory = max(s.MemoryTotal-int64(m.GetMemory().GetInactiveFile()), 0)
	for _, e := range m.GetIo().GetUsage() {
		s.Read += int64(e.GetRbytes())
		s.Written += int64(e.GetWbytes())
	}
	return s
}
