package stats

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// The families of /metrics/resource. They have the kubelet's names, because metrics-server reads them for the HPA.
var (
	podLabels       = []string{"namespace", "pod"}
	containerLabels = []string{"container", "namespace", "pod"}

	resourceNodeCPU         = prometheus.NewDesc("node_cpu_usage_seconds_total", "Cumulative cpu time consumed by the node in core-seconds", nil, nil)
	resourceNodeMemory      = prometheus.NewDesc("node_memory_working_set_bytes", "Current working set of the node in bytes", nil, nil)
	resourceContainerCPU    = prometheus.NewDesc("container_cpu_usage_seconds_total", "Cumulative cpu time consumed by the container in core-seconds", containerLabels, nil)
	resourceContainerMemory = prometheus.NewDesc("container_memory_working_set_bytes", "Current working set of the container in bytes", containerLabels, nil)
	resourceContainerStart  = prometheus.NewDesc("container_start_time_seconds", "Start time of the container since unix epoch in seconds", containerLabels, nil)
	resourcePodCPU          = prometheus.NewDesc("pod_cpu_usage_seconds_total", "Cumulative cpu time consumed by the pod in core-seconds", podLabels, nil)
	resourcePodMemory       = prometheus.NewDesc("pod_memory_working_set_bytes", "Current working set of the pod in bytes", podLabels, nil)
	resourceError           = prometheus.NewDesc("resource_scrape_error", "1 if there was an error while getting container metrics, 0 otherwise", nil, nil)
)

// Resource collects the families of /metrics/resource. The samples have the time of the measurement.
type Resource struct{ *Collector }

var _ prometheus.Collector = Resource{}

// Describe implements prometheus.Collector.
func (Resource) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		resourceNodeCPU, resourceNodeMemory, resourceContainerCPU, resourceContainerMemory, resourceContainerStart,
		resourcePodCPU, resourcePodMemory, resourceError,
	} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (r Resource) Collect(out chan<- prometheus.Metric) {
	send := func(at time.Time, d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		out <- prometheus.NewMetricWithTimestamp(at, prometheus.MustNewConstMetric(d, kind, v, labels...))
	}
	now, failed := time.Now(), 0.0
	if used, _, err := r.host.CPU(); err == nil {
		send(now, resourceNodeCPU, prometheus.CounterValue, used.Seconds())
	} else {
		failed = 1
	}
	if m, err := r.host.Memory(); err == nil {
		send(now, resourceNodeMemory, prometheus.GaugeValue, float64(m.WorkingSet()))
	} else {
		failed = 1
	}
	for _, u := range r.CollectContainers(context.Background()) {
		p := u.Process
		if p == nil {
			continue
		}
		pod := []string{u.VM.Namespace, u.VM.Pod}
		for _, c := range u.Containers {
			container := []string{c.Name, u.VM.Namespace, u.VM.Pod}
			send(c.At, resourceContainerCPU, prometheus.CounterValue, c.CPU.Seconds(), container...)
			send(c.At, resourceContainerMemory, prometheus.GaugeValue, float64(c.WorkingSet), container...)
			out <- prometheus.MustNewConstMetric(resourceContainerStart, prometheus.GaugeValue, float64(p.Since.UnixNano())/1e9, container...)
		}
		send(u.At, resourcePodCPU, prometheus.CounterValue, p.CPU.Seconds(), pod...)
		send(u.At, resourcePodMemory, prometheus.GaugeValue, float64(p.WorkingSet), pod...)
	}
	out <- prometheus.MustNewConstMetric(resourceError, prometheus.GaugeValue, failed)
}

// The families of VMs and of the node at /metrics.
var (
	vmLabels = []string{"vm", "pod", "namespace", "backend"}

	vmCPU    = prometheus.NewDesc("vk_cocoon_vm_cpu_seconds_total", "CPU time of the VM's hypervisor process, of all its runs that were seen.", vmLabels, nil)
	vmRSS    = prometheus.NewDesc("vk_cocoon_vm_memory_rss_bytes", "Resident memory of the VM's hypervisor process.", vmLabels, nil)
	vmDisk   = prometheus.NewDesc("vk_cocoon_vm_disk_cow_bytes", "Bytes that the VM's writable disk occupies.", vmLabels, nil)
	vmRx     = prometheus.NewDesc("vk_cocoon_vm_network_rx_bytes_total", "Bytes that the guest received.", vmLabels, nil)
	vmTx     = prometheus.NewDesc("vk_cocoon_vm_network_tx_bytes_total", "Bytes that the guest sent.", vmLabels, nil)
	nodeCPU  = prometheus.NewDesc("vk_cocoon_node_cpu_seconds_total", "CPU time of the node since it was started, all CPUs together.", nil, nil)
	nodeMem  = prometheus.NewDesc("vk_cocoon_node_memory_used_bytes", "Memory of the node that is not available.", nil, nil)
	nodeFree = prometheus.NewDesc("vk_cocoon_node_storage_available_bytes", "Bytes available on the file system of the VMs' disks.", nil, nil)
	nodeDisk = prometheus.NewDesc("vk_cocoon_node_storage_total_bytes", "Size of the file system of the VMs' disks.", nil, nil)
)

// Families collects the vk_cocoon_vm_* and vk_cocoon_node_* families.
type Families struct{ *Collector }

var _ prometheus.Collector = Families{}

// Describe implements prometheus.Collector.
func (Families) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{vmCPU, vmRSS, vmDisk, vmRx, vmTx, nodeCPU, nodeMem, nodeFree, nodeDisk} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (f Families) Collect(out chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, kind, v, labels...)
	}
	for _, u := range f.Collector.Collect() {
		labels := []string{u.VM.Name, u.VM.Pod, u.VM.Namespace, u.VM.Backend}
		if p := u.Process; p != nil {
			send(vmCPU, prometheus.CounterValue, p.CPU.Seconds(), labels...)
			send(vmRSS, prometheus.GaugeValue, float64(p.RSS), labels...)
		}
		if u.Disk != nil {
			send(vmDisk, prometheus.GaugeValue, float64(*u.Disk), labels...)
		}
		if n := u.Network; n != nil {
			send(vmRx, prometheus.CounterValue, float64(n.RxBytes), labels...)
			send(vmTx, prometheus.CounterValue, float64(n.TxBytes), labels...)
		}
	}
	if used, _, err := f.host.CPU(); err == nil {
		send(nodeCPU, prometheus.CounterValue, used.Seconds())
	}
	if m, err := f.host.Memory(); err == nil {
		send(nodeMem, prometheus.GaugeValue, float64(m.Total-m.Available))
	}
	if d, err := f.host.Disk(); err == nil {
		send(nodeFree, prometheus.GaugeValue, float64(d.Available))
		send(nodeDisk, prometheus.GaugeValue, float64(d.Total))
	}
}
