// Package snapshotcontroller is the controller of the API of volume snapshots, from
// kubernetes-csi/external-snapshotter. It only includes it in this binary: for
// volumes of nodes, which take their snapshots themselves.
package snapshotcontroller

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os/signal"
	"sync"
	"syscall"
	"time"

	snapshotclient "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned"
	snapshotscheme "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned/scheme"
	snapshotinformers "github.com/kubernetes-csi/external-snapshotter/client/v8/informers/externalversions"
	controller "github.com/kubernetes-csi/external-snapshotter/v8/pkg/common-controller"
	"github.com/kubernetes-csi/external-snapshotter/v8/pkg/metrics"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/workqueue"
)

const (
	workers    = 10
	resync     = 15 * time.Minute
	retryFirst = time.Second
	retryMost  = time.Minute
)

// Main runs the controller with the credentials of --kubeconfig until a signal
// arrives, and returns the exit code.
func Main(args []string, stderr io.Writer) int {
	fs := flag.NewFlagSet("cocoon-up snapshot-controller", flag.ContinueOnError)
	fs.SetOutput(stderr)
	path := fs.String("kubeconfig", "", "credentials (required)")
	if err := fs.Parse(args); err != nil {
		return 2
	}
	if *path == "" || fs.NArg() > 0 {
		fmt.Fprintln(stderr, "usage: cocoon-up snapshot-controller --kubeconfig FILE")
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, *path); err != nil {
		fmt.Fprintln(stderr, "snapshot-controller:", err)
		return 1
	}
	return 0
}

func run(ctx context.Context, kubeconfig string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
	}
	config.QPS, config.Burst = 100, 200
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
	}
	client, err := snapshotclient.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
	}
	if err := snapshotscheme.AddToScheme(scheme.Scheme); err != nil { // Events name the objects
		return err
	}
	snapshots, core := snapshotinformers.NewSharedInformerFactory(client, resync), informers.NewSharedInformerFactory(kube, resync)
	v1, groups, objects := snapshots.Snapshot().V1(), snapshots.Groupsnapshot().V1beta2(), core.Core().V1()
	limiter := func() workqueue.TypedRateLimiter[string] {
		return workqueue.NewTypedItemExponentialFailureRateLimiter[string](retryFirst, retryMost)
	}
	c := controller.NewCSISnapshotCommonController(client, kube, v1.VolumeSnapshots(), v1.VolumeSnapshotContents(), v1.VolumeSnapshotClasses(),
		groups.VolumeGroupSnapshots(), groups.VolumeGroupSnapshotContents(), groups.VolumeGroupSnapshotClasses(),
		objects.PersistentVolumeClaims(), objects.PersistentVolumes(), objects.Nodes(), metrics.NewMetricsManager(),
		resync, limiter(), limiter(), limiter(), limiter(),
		true,  // each node takes the snapshots of its volumes
		true,  // the mode of a volume stays that of its source
		false, // no snapshots of groups
	)
	snapshots.Start(ctx.Done())
	core.Start(ctx.Done())
	var group sync.WaitGroup
	c.Run(workers, ctx.Done(), &group)
	group.Wait()
	return nil
}
