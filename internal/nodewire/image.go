package nodewire

import (
	"slices"
	"time"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

// EncodeImage returns i as a message.
func EncodeImage(i image.Image) *nodev1.Image {
	return &nodev1.Image{
		Id: i.ID, Name: i.Name, Type: string(i.Type), Size: i.Size, CreatedAtNs: EncodeTime(i.CreatedAt),
		Config: EncodeProcess(i.Config), Arch: i.Arch, Digest: i.Digest, Source: i.Source, UsedAtNs: EncodeTime(i.UsedAt),
	}
}

// DecodeImage returns the image in m.
func DecodeImage(m *nodev1.Image) image.Image {
	return image.Image{
		ID: m.GetId(), Name: m.GetName(), Type: vm.ImageType(m.GetType()), Size: m.GetSize(), CreatedAt: DecodeTime(m.GetCreatedAtNs()),
		Config: DecodeProcess(m.GetConfig()), Arch: m.GetArch(), Digest: m.GetDigest(), Source: m.GetSource(), UsedAt: DecodeTime(m.GetUsedAtNs()),
	}
}

// EncodePull returns r as a message.
func EncodePull(r image.PullRequest) *nodev1.PullRequest {
	return &nodev1.PullRequest{
		Name: r.Name, Policy: string(r.Policy), Force: r.Force,
		Auth: each(r.Auth, encodeRegistryAuth),
	}
}

// DecodePull returns the request in m.
func DecodePull(m *nodev1.PullRequest) image.PullRequest {
	return image.PullRequest{
		Name: m.GetName(), Policy: image.PullPolicy(m.GetPolicy()), Force: m.GetForce(),
		Auth: each(m.GetAuth(), decodeRegistryAuth),
	}
}

func encodeRegistryAuth(a image.RegistryAuth) *nodev1.RegistryAuth {
	return &nodev1.RegistryAuth{Registry: a.Registry, Username: a.Username, Password: a.Password, Token: a.Token}
}

func decodeRegistryAuth(a *nodev1.RegistryAuth) image.RegistryAuth {
	return image.RegistryAuth{Registry: a.GetRegistry(), Username: a.GetUsername(), Password: a.GetPassword(), Token: a.GetToken()}
}

// EncodeProgress returns p as a message.
func EncodeProgress(p image.Progress) *nodev1.Progress {
	return &nodev1.Progress{Phase: p.Phase, Done: p.Done, Total: p.Total}
}

// DecodeProgress returns the progress in m.
func DecodeProgress(m *nodev1.Progress) image.Progress {
	return image.Progress{Phase: m.GetPhase(), Done: m.GetDone(), Total: m.GetTotal()}
}

// EncodeExplanation returns e as a message.
func EncodeExplanation(e image.Explanation) *nodev1.ExplainResponse {
	return &nodev1.ExplainResponse{
		Name: e.Name, Kind: e.Kind, Key: e.Key, Url: e.URL, Source: e.Source, Rule: e.Rule, Transport: e.Transport,
		Present: e.Present, Steps: slices.Clone(e.Steps),
	}
}

// DecodeExplanation returns the explanation in m.
func DecodeExplanation(m *nodev1.ExplainResponse) image.Explanation {
	return image.Explanation{
		Name: m.GetName(), Kind: m.GetKind(), Key: m.GetKey(), URL: m.GetUrl(), Source: m.GetSource(), Rule: m.GetRule(),
		Transport: m.GetTransport(), Present: m.GetPresent(), Steps: cloneSlice(m.GetSteps()),
	}
}

// EncodeGCLimits returns l as a request.
func EncodeGCLimits(l image.GCLimits) *nodev1.CollectRequest {
	return &nodev1.CollectRequest{
		MinAgeNs: int64(l.MinAge), MaxAgeNs: int64(l.MaxAge), MaxSize: l.MaxSize, High: int64(l.High), Low: int64(l.Low), DryRun: l.DryRun,
	}
}

// DecodeGCLimits returns the limits in m.
func DecodeGCLimits(m *nodev1.CollectRequest) image.GCLimits {
	return image.GCLimits{
		MinAge: time.Duration(m.GetMinAgeNs()), MaxAge: time.Duration(m.GetMaxAgeNs()), MaxSize: m.GetMaxSize(),
		High: int(m.GetHigh()), Low: int(m.GetLow()), DryRun: m.GetDryRun(),
	}
}

// EncodeCollected returns c as a message.
func EncodeCollected(c image.Collected) *nodev1.CollectResponse {
	return &nodev1.CollectResponse{Images: each(c.Images, EncodeImage), Freed: c.Freed}
}

// DecodeCollected returns what was collected according to m.
func DecodeCollected(m *nodev1.CollectResponse) image.Collected {
	return image.Collected{Images: each(m.GetImages(), DecodeImage), Freed: m.GetFreed()}
}

// EncodeMappings returns the mappings of source as a request.
func EncodeMappings(source string, mappings []image.Mapping) *nodev1.SyncMappingsRequest {
	return &nodev1.SyncMappingsRequest{Source: source, Mappings: each(mappings, func(m image.Mapping) *nodev1.Mapping {
		return &nodev1.Mapping{Name: m.Name, Yaml: slices.Clone(m.YAML)}
	})}
}

// DecodeMappings returns the source and its mappings in m.
func DecodeMappings(m *nodev1.SyncMappingsRequest) (source string, mappings []image.Mapping) {
	return m.GetSource(), each(m.GetMappings(), func(m *nodev1.Mapping) image.Mapping {
		return image.Mapping{Name: m.GetName(), YAML: cloneSlice(m.GetYaml())}
	})
}

// EncodeMappingProblems returns the problems as a message.
func EncodeMappingProblems(problems []image.MappingProblem) *nodev1.MappingProblems {
	return &nodev1.MappingProblems{Problems: each(problems, func(p image.MappingProblem) *nodev1.MappingProblem {
		return &nodev1.MappingProblem{Source: p.Source, Mapping: p.Mapping, Rule: p.Rule, Message: p.Message}
	})}
}

// DecodeMappingProblems returns the problems in m.
func DecodeMappingProblems(m *nodev1.MappingProblems) []image.MappingProblem {
	return each(m.GetProblems(), func(p *nodev1.MappingProblem) image.MappingProblem {
		return image.MappingProblem{Source: p.GetSource(), Mapping: p.GetMapping(), Rule: p.GetRule(), Message: p.GetMessage()}
	})
}
