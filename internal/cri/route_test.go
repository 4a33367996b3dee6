package cri

import (
	"context"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// stored are images of VM pods by name.
type stored map[string]bool

func (s stored) Has(_ context.Context, spec *cri.ImageSpec) bool { return s[spec.GetImage()] }

// known are the UIDs of VM pods.
type known map[string]bool

func (k known) Has(_ context.Context, pod *cri.PodSandboxMetadata) bool { return k[pod.GetUid()] }

func TestWhoAnswers(t *testing.T) {
	type annotations = map[string]string
	run := func(handler string, a annotations) any {
		return &cri.RunPodSandboxRequest{RuntimeHandler: handler, Config: &cri.PodSandboxConfig{Annotations: a}}
	}
	target := func(v string) annotations { return annotations{"kubernetes.io/target-runtime": v} }
	image := func(name, handler string, a annotations) *cri.ImageSpec {
		return &cri.ImageSpec{Image: name, RuntimeHandler: handler, Annotations: a}
	}
	const none side = -1 // InvalidArgument
	for name, tc := range map[string]struct {
		req  any
		want side
	}{
		"no handler":                      {run("", nil), theirs},
		"our handler":                     {run("cocoon", nil), ours},
		"another handler":                 {run("runc", nil), theirs},
		"annotation of Virtlet":           {run("", target("virtlet.cloud")), ours},
		"annotation with our name":        {run("", target("cocoon")), ours},
		"annotation and our handler":      {run("cocoon", target("virtlet.cloud")), ours},
		"annotation against the handler":  {run("runc", target("virtlet.cloud")), none},
		"annotation of nobody":            {run("", target("mars")), none},
		"annotation of nobody, ours":      {run("cocoon", target("mars")), none},
		"annotation is their own handler": {run("runc", target("runc")), theirs},

		"sandbox of ours":        {&cri.StopPodSandboxRequest{PodSandboxId: "vm-aaaa"}, ours},
		"sandbox of theirs":      {&cri.StopPodSandboxRequest{PodSandboxId: "c0ffee"}, theirs},
		"container of ours":      {&cri.ExecSyncRequest{ContainerId: "vm-aaaa-b"}, ours},
		"container of theirs":    {&cri.ExecSyncRequest{ContainerId: "c0ffee"}, theirs},
		"new container in ours":  {&cri.CreateContainerRequest{PodSandboxId: "vm-aaaa"}, ours},
		"list of all":            {&cri.ListPodSandboxRequest{}, both},
		"list of one":            {&cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{Id: "vm-a"}}, ours},
		"list of their one":      {&cri.ListContainersRequest{Filter: &cri.ContainerFilter{Id: "c0"}}, theirs},
		"list of a sandbox":      {&cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: "vm-a"}}, ours},
		"list by label":          {&cri.ListContainersRequest{Filter: &cri.ContainerFilter{LabelSelector: annotations{"a": "b"}}}, both},
		"stream of all":          {&cri.StreamContainersRequest{}, both},
		"events":                 {&cri.GetEventsRequest{}, mixed},
		"metrics":                {&cri.ListPodSandboxMetricsRequest{}, both},
		"status":                 {&cri.StatusRequest{}, both},
		"version":                {&cri.VersionRequest{}, theirs},
		"configuration":          {&cri.RuntimeConfigRequest{}, theirs},
		"pull":                   {&cri.PullImageRequest{Image: image("busybox", "", nil)}, theirs},
		"pull by prefix":         {&cri.PullImageRequest{Image: image("virtlet.cloud/cirros", "", nil)}, ours},
		"pull for our handler":   {&cri.PullImageRequest{Image: image("busybox", "cocoon", nil)}, ours},
		"pull by the pod":        {&cri.PullImageRequest{Image: image("busybox", "", target("virtlet.cloud"))}, ours},
		"pull by the sandbox":    {&cri.PullImageRequest{Image: image("busybox", "", nil), SandboxConfig: &cri.PodSandboxConfig{Annotations: target("cocoon")}}, ours},
		"pull for a pod of ours": {&cri.PullImageRequest{Image: image("busybox", "", nil), SandboxConfig: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Uid: "u1"}}}, ours},
		"status of their image":  {&cri.ImageStatusRequest{Image: image("busybox", "", nil)}, theirs},
		"status of an image":     {&cri.ImageStatusRequest{Image: image("mine", "", nil)}, theirs},
		"status for our handler": {&cri.ImageStatusRequest{Image: image("busybox", "cocoon", nil)}, ours},
		"status by the prefix":   {&cri.ImageStatusRequest{Image: image("virtlet.cloud/cirros", "", nil)}, ours},
		"removal":                {&cri.RemoveImageRequest{Image: image("busybox", "", nil)}, theirs},
		"removal of what both":   {&cri.RemoveImageRequest{Image: image("mine", "", nil)}, both},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := router{[]string{"cocoon"}, stored{"mine": true}, known{"u1": true}}.route(t.Context(), tc.req)
			switch {
			case tc.want == none && !errdefs.Is(err, errdefs.InvalidArgument):
				t.Errorf("got %v, %v; want InvalidArgument", got, err)
			case tc.want != none && (err != nil || got != tc.want):
				t.Errorf("got %v, %v; want %v", got, err, tc.want)
			}
		})
	}
}
